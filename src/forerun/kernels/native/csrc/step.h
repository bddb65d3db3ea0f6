// What a step works in, the same for all instruction sets.
#pragma once
#include <cstdlib>
#include <new>
#include <vector>

#include "forerun.h"

namespace forerun {

// Memory that is handed out in parts and kept for the next step of the same thread.
class Workspace {
  public:
    ~Workspace() { free(memory_); }
    // Forget what a step that failed has wished.
    void clear() {
        wishes_.clear();
        used_ = 0;
    }
    template <class T> void want(T*& pointer, int64_t count) {
        wishes_.push_back({(void**)&pointer, used_});
        used_ += (count * (int64_t)sizeof(T) + 127) / 64 * 64;
    }
    void allocate() {
        if (used_ > size_) {
            free(memory_);
            size_ = used_ + used_ / 4;
            memory_ = (char*)aligned_alloc(64, (size_ + 63) / 64 * 64);
            if (!memory_) {
                size_ = 0;
                throw std::bad_alloc();
            }
        }
        for (const Wish& wish : wishes_) *wish.pointer = memory_ + wish.offset;
        clear();
    }

  private:
    struct Wish {
        void** pointer;
        int64_t offset;
    };
    std::vector<Wish> wishes_;
    char* memory_ = nullptr;
    int64_t size_ = 0, used_ = 0;
};

// This thread's. No step runs within another, so that all of them use the same.
inline Workspace& workspace() {
    static thread_local Workspace space;
    space.clear();
    return space;
}

// Whether a product reads its rows in codes.
inline bool reads_codes(const ForerunLinear& w) { return w.kind >= FORERUN_INT8; }

template <class Input> void plan_input(Workspace& space, Input& in, int64_t n, int64_t width, bool codes) {
    in.width = in.stride = width;
    in.groups = (width + 31) / 32;
    in.codes = nullptr;
    if (!codes) return;
    space.want(in.codes, n * in.groups * 32);
    space.want(in.scales, n);
    space.want(in.sums, n * in.groups);
    space.want(in.totals, n * in.groups);
}

}  // namespace forerun
