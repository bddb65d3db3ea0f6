// What a step works in, the same for all instruction sets.
#pragma once
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <vector>

#include "layouts.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

// Unrolled, so that sums stay in registers.
#define EACH_ROW _Pragma("GCC unroll 12") for (int r = 0; r < R; r++)
#define EACH_BLOCK _Pragma("GCC unroll 4") for (int c = 0; c < C; c++)
// call<E>(...) of the numbers that keys and values are stored in.
#define IN_CACHE_FORMAT(format, call, ...)                        \
    ((format) == FORERUN_CACHE_INT8      ? call<int8_t>(__VA_ARGS__)  \
     : (format) == FORERUN_CACHE_FLOAT32 ? call<float>(__VA_ARGS__)   \
                                         : call<uint16_t>(__VA_ARGS__))

namespace forerun {

// Bytes from the weights that are read to those that are asked for, by kind, and for one, two and more rows: the sums of one
// line keep some processors from looking that far ahead themselves. 0: what is read now is asked for, which costs nothing.
constexpr int NUM_KINDS = FORERUN_FLOAT32 + 2 + sizeof(LAYOUTS) / sizeof(Layout), PREFETCH_CLASSES = 3;
struct PrefetchDistances {
    int32_t bytes[NUM_KINDS][PREFETCH_CLASSES];
    PrefetchDistances() {
        for (auto& of_kind : bytes)
            for (int32_t& distance : of_kind) distance = 4096;
    }
};
inline PrefetchDistances prefetch_distances;
inline int32_t& prefetch_distance(int32_t kind, int64_t rows) {
    return prefetch_distances.bytes[kind][rows < PREFETCH_CLASSES ? rows - 1 : PREFETCH_CLASSES - 1];
}

// Bytes of a workspace that a thread keeps from one call to the next: a step's of decoding, not those of a long prompt.
constexpr int64_t KEPT_BYTES = 64 << 20;

// Memory that is handed out in parts and kept for the next step of the same thread.
class Workspace {
  public:
    ~Workspace() { release(); }
    int64_t bytes() const { return size_; }
    // Give back what is not kept between two calls.
    void trim() {
        if (size_ > KEPT_BYTES) release();
    }
    // Forget what a step that failed has wished.
    void clear() {
        wishes_.clear();
        used_ = 0;
    }
    template <class T> void want(T*& pointer, int64_t count) {
        wishes_.push_back({(void**)&pointer, used_, count * (int64_t)sizeof(T)});
        used_ += (count * (int64_t)sizeof(T) + 127) / 64 * 64;
    }
    void allocate() {
        if (used_ > size_) {
            release();
            size_ = (used_ + used_ / 4 + 63) / 64 * 64;
            memory_ = (char*)operator new(size_, ALIGNMENT, std::nothrow);
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        for (const Wish& wish : wishes_) *wish.pointer = memory_ + wish.offset;
        forbid_gaps();
        clear();
    }

  private:
    static constexpr std::align_val_t ALIGNMENT{64};
    struct Wish {
        void** pointer;
        int64_t offset, bytes;
    };
    void release() {
        operator delete(memory_, ALIGNMENT);
        memory_ = nullptr;
        size_ = 0;
    }
    // AddressSanitizer reports who leaves the part that was meant.
    void forbid_gaps() {
#if defined(__SANITIZE_ADDRESS__)
        __asan_poison_memory_region(memory_, size_);
        for (const Wish& wish : wishes_) __asan_unpoison_memory_region(memory_ + wish.offset, wish.bytes);
#endif
    }
    std::vector<Wish> wishes_;
    char* memory_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// This thread's. No step runs within another, so that all of them use the same.
inline Workspace& kept_workspace() {
    static thread_local Workspace space;
    return space;
}
// The same for a step that begins.
inline Workspace& workspace() {
    kept_workspace().clear();
    return kept_workspace();
}

// The largest code of 16 bits that products take of activations, and where one of them adds whole numbers over all of its
// inputs, no more than lets them, times codes of 8 bits, add up within 32 bits.
inline float largest_code(std::initializer_list<const ForerunLinear*> products) {
    int64_t most = 32767;
    for (const ForerunLinear* w : products) {
        const int64_t fits = 2147483647 / (128 * (w->in_features > 0 ? (int64_t)w->in_features : 1));
        if (w->kind == FORERUN_INT8 && w->activation_bits != 8 && fits < most) most = fits;
    }
    return (float)most;
}

// What the rows of some products are brought into.
struct Forms {
    bool bfloat16 = false, codes = false, bytes = false;
    void add(std::initializer_list<const ForerunLinear*> products) {
        for (const ForerunLinear* w : products) {
            bfloat16 |= w->kind == FORERUN_BFLOAT16;
            codes |= w->kind >= FORERUN_INT8 && w->activation_bits != 8;
            bytes |= w->kind >= FORERUN_INT8 && w->activation_bits == 8;
        }
    }
};

template <class Input> void plan_input(Workspace& space, Input& in, int64_t n, int64_t width, const Forms& forms) {
    in.width = in.stride = width;
    in.groups = (width + 31) / 32;
    in.bfloat16 = nullptr;
    in.codes = nullptr;
    in.bytes = nullptr;
    if (Input::dots_bfloat16 && forms.bfloat16) space.want(in.bfloat16, (n + Input::SPARE_ROWS) * in.groups * 32);
    if (forms.bytes) {
        space.want(in.bytes, n * in.groups * 32);
        space.want(in.byte_scales, n * in.groups);
        space.want(in.byte_sums, n * in.groups);
        space.want(in.byte_totals, n * in.groups);
        space.want(in.byte_halves, n * in.groups * 2);
    }
    if (!forms.codes) return;
    space.want(in.codes, n * in.groups * 32);
    space.want(in.scales, n);
    space.want(in.sums, n * in.groups);
    space.want(in.totals, n * in.groups);
}
template <class Input>
void plan_input(Workspace& space, Input& in, int64_t n, int64_t width, std::initializer_list<const ForerunLinear*> products) {
    Forms forms;
    forms.add(products);
    plan_input(space, in, n, width, forms);
}

}  // namespace forerun
