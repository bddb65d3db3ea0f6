// Threads that go through a step together.
//
// Every thread runs the same function. The units of its loops are divided into shares, one for each thread, which claims
// parts of its own and, once that is done, of the others'. So a thread reads weights that follow each other and writes to
// no line of memory that others write to, until the end. A loop is over when all of its units are done, not when all
// threads have arrived: a thread that the system does not run holds up the others by what it has claimed. A call ends when
// all have returned, though. Where that takes long, because another program wants a processor, calls that follow take
// fewer threads.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include <sched.h>
#include <unistd.h>

namespace forerun {

inline void spin() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // some ten ns, as the other; `yield` takes none
#endif
}

typedef std::chrono::steady_clock Clock;
typedef std::chrono::duration<double> Seconds;

// How many threads the calls of a thread take: one less after a call that waited for most of its time, more again after a
// pause. Pauses grow while calls with all threads wait, so that a program that stays costs little. libgomp ends the
// threads that a call does not take and starts others for the next that does.
class Pace {
  public:
    int threads(int most, Clock::time_point now) {
        if (fewer_ && now >= until_) {
            fewer_ /= 2;
            pause_until(now);
        }
        return threads(most);
    }

    // As many as the last call: what is not judged tries no more.
    int threads(int most) const { return most > fewer_ ? most - fewer_ : 1; }

    // taken, waited: seconds of a call with several threads that ends now.
    void judge(double taken, double waited, Clock::time_point now) {
        constexpr double NOISE = 2e-4, SHORTEST = 4e-3, LONGEST = 256e-3;  // SHORTEST: a time slice of Linux
        if (waited > NOISE && waited > taken / 2) {
            fewer_++;
            pause_ = 2 * pause_ + SHORTEST < LONGEST ? 2 * pause_ + SHORTEST : LONGEST;
            pause_until(now);
        } else if (!fewer_) {
            pause_ = pause_ > taken ? pause_ - taken : 0;
        }
    }

  private:
    void pause_until(Clock::time_point now) { until_ = now + std::chrono::duration_cast<Clock::duration>(Seconds(pause_)); }

    int fewer_ = 0;
    double pause_ = 0;
    Clock::time_point until_;
};

// This thread's, whose calls have OpenMP threads of their own.
inline Pace& pace() {
    static thread_local Pace own;
    return own;
}

// A thread's share of a loop, from which the others claim too once theirs is done.
struct alignas(64) Share {
    std::atomic<uint64_t> ticket{0};  // the last loop in which one claimed here << 32 | units claimed in it
};

struct Team {
    const int threads;
    std::vector<Share> shares;
    alignas(64) std::atomic<uint64_t> done{0};  // units of all loops
    alignas(64) std::atomic<int> arrived{0};
    std::atomic<double> waited{0};  // seconds of the member that has waited longest
    // most: threads, unless other programs want the processors.
    explicit Team(int most) : threads(pace().threads(most, Clock::now())), shares(threads) {}
};

// Units that follow each other; none where both are the same.
struct Part {
    int64_t first, last;
};

// One thread's place in the loops of a team:
//     for (const int64_t unit : member.each(units)) ...
//     for (const auto [first, last] : member.parts(units)) ...
// All members run through the same loops in the same order, and none goes on before all units of a loop are done.
class Member {
    struct End {};
    struct Unit {
        Member& member;
        Part left;
        int64_t operator*() const { return left.first; }
        void operator++() { left.first++; }
        bool operator!=(End) {
            if (left.first == left.last) left = member.claim();
            return left.first < left.last;
        }
    };
    struct Claim {
        Member& member;
        Part part;
        Part operator*() const { return part; }
        void operator++() {}
        bool operator!=(End) {
            part = member.claim();
            return part.first < part.last;
        }
    };
    // What a range-based for runs through, from one Unit or Claim to the next.
    template <class Position> class Loop {
      public:
        Loop(Member& member, int64_t units) : member_(member) { member.open(units); }
        ~Loop() { member_.close(); }
        Loop(const Loop&) = delete;
        Position begin() { return {member_, {0, 0}}; }
        End end() { return {}; }

      private:
        Member& member_;
    };

  public:
    explicit Member(Team& team) : team_(team), index_(team.arrived.fetch_add(1) % team.threads) {}

    // 0 .. threads - 1, of no other member.
    int64_t index() const { return index_; }

    // The units that this thread claims, of all from 0 on.
    Loop<Unit> each(int64_t units) { return Loop<Unit>(*this, units); }

    // The same, part by part.
    Loop<Claim> parts(int64_t units) { return Loop<Claim>(*this, units); }

    // What these loops are made of: open, claim until a part is empty, close.
    void open(int64_t units) {
        units_ = units;
        target_ += units;
        number_++;
        passed_ = 0;
    }

    Part claim() {
        if (team_.threads == 1) {
            const Part all{0, units_};
            units_ = 0;
            return all;
        }
        for (; passed_ < team_.threads; passed_++) {
            const Part part = claim_of((index_ + passed_) % team_.threads);
            if (part.first < part.last) return part;
        }
        if (claimed_) team_.done.fetch_add(claimed_, std::memory_order_acq_rel);
        claimed_ = 0;
        return {0, 0};
    }

    void close() {
        if (team_.threads == 1) return;
        for (int turn = 0; !is_over(); turn++) {
            if (turn == 4096) return wait();
            spin();
        }
    }

  private:
    bool is_over() const { return team_.done.load(std::memory_order_acquire) >= target_; }

    // Let others run until the loop is over. With few units for a thread, whoever has one less waits for long beside no
    // other program: at two for each, a third of the loop's time at most, where units are alike.
    __attribute__((noinline, cold)) void wait() {
        const Clock::time_point begin = Clock::now();
        while (!is_over()) sched_yield();
        if (units_ < 2 * team_.threads) return;
        waited_ += Seconds(Clock::now() - begin).count();
        if (waited_ > team_.waited) team_.waited = waited_;  // of two at once, either
    }

    Part claim_of(int64_t index) {
        const int64_t begin = units_ * index / team_.threads, end = units_ * (index + 1) / team_.threads;
        std::atomic<uint64_t>& share = team_.shares[index].ticket;
        uint64_t ticket = share.load(std::memory_order_relaxed);
        while ((ticket >> 32) <= number_) {
            const int64_t next = begin + ((ticket >> 32) == number_ ? (int64_t)(ticket & 0xffffffff) : 0);
            if (next >= end) return {0, 0};
            // many at first, one at last: threads end at nearly the same time, even one that is four times as slow
            int64_t count = (end - next) / (4 * team_.threads);
            if (count < 1) count = 1;
            if (share.compare_exchange_weak(ticket, number_ << 32 | (uint64_t)(next + count - begin),
                                            std::memory_order_acquire)) {
                claimed_ += count;
                return {next, next + count};
            }
        }
        return {0, 0};  // a later loop has begun, so this one is over
    }

    Team& team_;
    const int64_t index_;
    uint64_t number_ = 0, target_ = 0;
    int64_t units_ = 0, claimed_ = 0, passed_ = 0;
    double waited_ = 0;
};

// Threads of this library, for where no OpenMP runtime is shared. They spin briefly, then sleep.
class Pool {
  public:
    void run(void (*body)(void*), void* data, int threads) {
        std::unique_lock<std::mutex> busy(busy_, std::try_to_lock);
        if (!busy.owns_lock()) return body(data);  // another step has the threads
        while ((int)workers_.size() < threads - 1) {
            const int index = (int)workers_.size();
            try {
                workers_.emplace_back([this, index] { work(index); });
            } catch (const std::exception&) {  // the system gives no more: those that there are do
                threads = index + 1;
            }
        }
        {
            std::lock_guard<std::mutex> guard(mutex_);
            body_ = body;
            data_ = data;
            wanted_ = threads - 1;
            left_.store(threads - 1);
            job_.fetch_add(1);
        }
        wake_.notify_all();
        body(data);
        while (left_.load(std::memory_order_acquire) > 0) sched_yield();
    }

  private:
    void work(int index) {
        for (uint64_t seen = 0;;) {
            for (int turn = 0; turn < 2048 && job_.load(std::memory_order_acquire) == seen; turn++) spin();
            std::unique_lock<std::mutex> guard(mutex_);
            wake_.wait(guard, [&] { return job_.load() != seen; });
            seen = job_.load();
            if (index >= wanted_) continue;
            guard.unlock();
            body_(data_);
            left_.fetch_sub(1, std::memory_order_acq_rel);
        }
    }

    std::mutex busy_, mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
    std::atomic<uint64_t> job_{0};
    std::atomic<int> left_{0};
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    int wanted_ = 0;
};

typedef void (*GompParallel)(void (*)(void*), void*, unsigned, unsigned);

inline std::atomic<GompParallel>& shared_openmp() {
    static std::atomic<GompParallel> found{nullptr};
    return found;
}

// Threads do not survive a fork, so every process has a pool of its own. It is never destroyed: its threads wait.
inline Pool& pool() {
    static std::mutex mutex;
    static Pool* made = nullptr;
    static pid_t process = 0;
    std::lock_guard<std::mutex> guard(mutex);
    if (process != getpid()) {
        made = new Pool;
        process = getpid();
    }
    return *made;
}

inline void run_in_parallel(void (*body)(void*), void* data, Team& team) {
    if (team.threads == 1) return body(data);
    struct Call {
        void (*body)(void*);
        void* data;
        const Pace* caller;
        Clock::time_point done;  // by the caller
    } call{body, data, &pace(), {}};
    const auto enter = [](void* entered) {
        Call& c = *(Call*)entered;
        c.body(c.data);
        if (&pace() == c.caller) c.done = Clock::now();
    };
    const Clock::time_point begin = Clock::now();
    if (GompParallel openmp = shared_openmp().load())
        openmp(enter, &call, (unsigned)team.threads, 0);
    else
        pool().run(enter, &call, team.threads);
    const Clock::time_point end = Clock::now();
    pace().judge(Seconds(end - begin).count(), team.waited + Seconds(end - call.done).count(), end);
}

}  // namespace forerun
