// What a step works in, the same for all instruction sets.
#pragma once
#include <cstdlib>
#include <new>

#include "forerun.h"

namespace forerun {

// Memory that is handed out in parts and kept for the next step of the same thread.
class Workspace {
  public:
    ~Workspace() { free(memory_); }
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
        wishes_.clear();
        used_ = 0;
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

constexpr int ROW_CODES = 1, GROUP_CODES = 2;

inline int codes_of(const ForerunLinear& w) {
    return w.kind == FORERUN_INT8 ? ROW_CODES : w.kind > FORERUN_INT8 ? GROUP_CODES : 0;
}

template <class Input> void plan_input(Workspace& space, Input& in, int64_t n, int64_t width, int codes) {
    in.width = in.stride = width;
    in.groups = (width + 31) / 32;
    in.padded = 32 * in.groups;
    in.row_codes = in.group_codes = nullptr;
    if (codes & ROW_CODES) {
        space.want(in.row_codes, n * in.padded);
        space.want(in.row_scales, n);
        space.want(in.row_totals, n);
    }
    if (codes & GROUP_CODES) {
        space.want(in.group_codes, n * in.padded);
        space.want(in.group_scales, n * in.groups);
        space.want(in.group_sums, n * in.groups);
        space.want(in.group_totals, n * in.groups);
    }
}

}  // namespace forerun
