// Threads that share the work of a kernel, also on a machine whose cores are busy with other programs.
//
// A leader, the calling thread, runs the kernel; where work can be shared it cuts it into as many parts as the
// team has members and offers them. Helpers take parts as they come; parts that no helper has taken when the
// leader has done its own are done by the leader. So it never waits for a thread that has lost its core, unless
// that thread is in the middle of a part. Who waits spins for some microseconds and then sleeps: on a busy
// machine a spinning thread uses up the time that its own process is given. The parts depend on the size of
// the team alone, not on who does them, so that sums are added in the same order every time.
//
// Helpers are the threads of OpenMP, which torch has, too: they spin between regions, and a second pool beside
// them would have to share their cores. But an OpenMP region ends only when all of its threads have come. So
// once a region was without a core, or had to wait for a thread that was, helpers are for a while those of a
// pool of our own, which need not come at all, and get whole examples only.

#pragma once

#include <fcntl.h>
#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <mutex>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Nanoseconds = int64_t;
constexpr Nanoseconds MICROSECOND = 1000, MILLISECOND = 1000 * MICROSECOND, SECOND = 1000 * MILLISECOND;

constexpr int MOST_MEMBERS = 55;                        // of a team, a bit each beside the team's size
constexpr Nanoseconds SPIN_ALONE = 1000 * MICROSECOND;  // before a thread sleeps,
constexpr Nanoseconds SPIN_BUSY = 300 * MICROSECOND;    // and where others want the cores
constexpr Nanoseconds TURN = 2500 * MICROSECOND;        // for which Linux lets a thread run undisturbed
constexpr Nanoseconds LOST = 2 * MILLISECOND;           // without a core in a region,
constexpr Nanoseconds AGAIN = 50 * MILLISECOND;         // twice within such a time: the machine is busy,
constexpr Nanoseconds REMEMBERED = 100 * MILLISECOND;   // and is thought to be for as long

inline Nanoseconds now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * SECOND + time.tv_nsec;
}

// How long the calling thread has waited for a core since this was asked last, where Linux tells: the second
// number of schedstat is the sum.
inline Nanoseconds waited_for_core() {
    static thread_local Nanoseconds before = -1;
    char text[96] = "";
    const int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    const ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    char* rest = text;
    if (size > 0) std::strtoll(text, &rest, 10);
    const Nanoseconds sum = std::strtoll(rest, nullptr, 10), last = before;
    before = sum;
    return last < 0 ? 0 : sum - last;
}

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Until when the machine is thought to be busy.
inline std::atomic<Nanoseconds> busy_until{0};

inline bool is_busy() { return now() < busy_until.load(std::memory_order_relaxed); }

// A region that began then has lost its core. That happens now and then on a machine that has cores to spare.
inline void note_loss(Nanoseconds begin) {
    static std::atomic<Nanoseconds> last{-AGAIN};
    const Nanoseconds time = now();
    if (begin - last.exchange(time) < AGAIN) busy_until.store(time + REMEMBERED, std::memory_order_relaxed);
}

inline bool waits_passively() {
    static const bool passive = [] {
        const char* policy = std::getenv("OMP_WAIT_POLICY");
        return policy && (policy[0] == 'p' || policy[0] == 'P');
    }();
    return passive;
}

// Spin until a condition holds, or for some time; return whether it holds.
template <typename Condition>
bool spin_until(const Condition& holds, Nanoseconds most) {
    if (waits_passively()) return holds();
    for (Nanoseconds end = 0;;) {
        for (int i = 0; i < 64; ++i) {
            if (holds()) return true;
            pause();
        }
        const Nanoseconds time = now();
        if (!end) end = time + most;
        if (time > end) return holds();
    }
}

// The time that a thread has had its core for. Between two things that it works on it gives the core to others
// before they would take it, so that nobody waits for what it has begun.
class Turn {
   public:
    void begin() { start = now(); }

    void work_was(Nanoseconds time) { expected = std::min(time, TURN / 2); }

    void rest_if_over() {
        if (now() - start + expected < TURN) return;
        sched_yield();
        begin();
    }

   private:
    Nanoseconds start = 0, expected = 0;
};

// What a leader and its helpers share: parts of a stage, which each member has one of, or a number of items.
class Board {
   public:
    Nanoseconds slept = 0;  // by the leader, waiting for helpers

    // Do `work(part, member)` for all parts, a part for each member.
    template <typename Work>
    void share(int members, Nanoseconds spin, const Work& work) {
        begin(work, members - 1);  // without the leader's own
        offer(members, ((uint64_t{1} << members) - 1) & ~uint64_t{1});
        work(0, 0);
        while (take(0)) {}
        finish(spin);
    }

    // Do `work(item, member)` for all items.
    template <typename Work>
    void each(int members, long count, Nanoseconds spin, const Work& work) {
        begin(work, count);
        offer(members, COUNTS | uint64_t(count));
        while (take(0)) {}
        finish(spin);
    }

    // Do parts and items as one of the members until the board is closed.
    void help(int member, Nanoseconds spin, bool rests) {
        const auto called = [this, member] { return closed.load() || has_offer(member); };
        Turn turn;
        for (;;) {
            if (rests) {
                turn.begin();
                for (Nanoseconds start = now(); take(member); start = now()) {
                    turn.work_was(now() - start);
                    turn.rest_if_over();
                }
            } else {
                while (take(member)) {}
            }
            if (closed.load()) return;
            if (spin_until(called, spin)) continue;
            std::unique_lock<std::mutex> hold(lock);
            sleepers.fetch_add(1, std::memory_order_seq_cst);
            come.wait(hold, called);
            sleepers.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    void close() {
        std::lock_guard<std::mutex> hold(lock);
        closed.store(true);
        come.notify_all();
    }

   private:
    // From the top: the members of the team, for whom there is memory; whether items are offered; how many of
    // them, or a bit for each part, are not taken. A late thread takes what is offered then.
    static constexpr int FIELD = MOST_MEMBERS;
    static constexpr uint64_t COUNTS = uint64_t{1} << FIELD;
    // All that changes with a stage is in one line of the cache, which has to travel between cores.
    alignas(64) std::atomic<uint64_t> offers{0};
    std::atomic<long> left{0};  // that are not done
    void (*call)(const void*, long, int) = nullptr;
    const void* context = nullptr;
    alignas(64) std::atomic<bool> leader_sleeps{false};
    std::atomic<int> sleepers{0};
    std::atomic<bool> closed{false};
    std::mutex lock;
    std::condition_variable come, ready;

    static uint64_t rest_of(uint64_t word) { return word & (COUNTS - 1); }
    static bool is_for(uint64_t word, int member) { return rest_of(word) && member < int(word >> (FIELD + 1)); }

    bool has_offer(int member) const { return is_for(offers.load(std::memory_order_seq_cst), member); }

    template <typename Work>
    void begin(const Work& work, long count) {
        call = [](const void* which, long index, int member) { (*static_cast<const Work*>(which))(index, member); };
        context = &work;
        left.store(count, std::memory_order_relaxed);
    }

    void offer(int members, uint64_t what) {
        offers.store(uint64_t(members) << (FIELD + 1) | what, std::memory_order_seq_cst);
        if (!sleepers.load(std::memory_order_seq_cst)) return;
        std::lock_guard<std::mutex> hold(lock);
        come.notify_all();
    }

    // The last item, or a part: its own first, as the data that it worked on before are near.
    bool take(int member) {
        uint64_t word = offers.load(std::memory_order_acquire);
        while (is_for(word, member)) {
            const uint64_t rest = rest_of(word), own = uint64_t{1} << member;
            const uint64_t taken = word & COUNTS ? 1 : rest & own ? own : rest & -rest;
            if (!offers.compare_exchange_weak(word, word - taken, std::memory_order_acq_rel)) continue;
            call(context, word & COUNTS ? long(rest) - 1 : __builtin_ctzll(taken), member);
            done();
            return true;
        }
        return false;
    }

    void done() {
        if (left.fetch_sub(1, std::memory_order_seq_cst) != 1 || !leader_sleeps.load(std::memory_order_seq_cst))
            return;
        std::lock_guard<std::mutex> hold(lock);
        ready.notify_one();
    }

    // Wait for what others have begun.
    void finish(Nanoseconds spin) {
        if (spin_until([this] { return left.load(std::memory_order_acquire) == 0; }, spin)) return;
        const Nanoseconds start = now();
        std::unique_lock<std::mutex> hold(lock);
        leader_sleeps.store(true, std::memory_order_seq_cst);
        ready.wait(hold, [this] { return left.load(std::memory_order_seq_cst) == 0; });
        leader_sleeps.store(false, std::memory_order_relaxed);
        slept += now() - start;
    }
};

// The threads of our own. They never end, and the board outlives the program's static objects.
class Pool {
   public:
    std::mutex leader;  // one at a time
    Board board;

    // Make helpers for a team, as far as the system lets us.
    void grow(int members) {
        for (; helpers < members - 1; ++helpers) {
            pthread_t thread;
            sigset_t all, before;
            sigfillset(&all);
            pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
            Seat* seat = new Seat{this, helpers + 1};
            const bool failed = pthread_create(&thread, nullptr, &Pool::run, seat);
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            if (failed) {
                delete seat;
                return;
            }
            pthread_detach(thread);
        }
    }

    static Pool& instance() {
        static std::atomic<Pool*>& pool = made();
        return *pool.load();
    }

   private:
    struct Seat {
        Pool* pool;
        int member;
    };
    int helpers = 0;

    static void* run(void* given) {
        const Seat seat = *static_cast<Seat*>(given);
        delete static_cast<Seat*>(given);
        seat.pool->board.help(seat.member, SPIN_BUSY, true);
        return nullptr;
    }

    // A fork has none of the threads, neither ours nor those of OpenMP, which would be waited for.
    static std::atomic<Pool*>& made() {
        static std::atomic<Pool*> pool{new Pool};
        pthread_atfork(nullptr, nullptr, [] {
            pool.store(new Pool);
            busy_until.store(INT64_MAX, std::memory_order_relaxed);
        });
        return pool;
    }
};

// If not 0, so many CPUs are there as far as teams are concerned, for tests.
inline std::atomic<int> pretended_cpus{0};

// The CPUs that the calling thread may run on, asked for again after some milliseconds.
inline int cpus_of_thread() {
#if defined(__linux__)
    static thread_local Nanoseconds asked = -SECOND;
    static thread_local int known = MOST_MEMBERS;
    const Nanoseconds time = now();
    if (time - asked > 10 * MILLISECOND) {
        cpu_set_t cpus;
        const bool bound = omp_get_proc_bind() != omp_proc_bind_false;  // by OpenMP, to one CPU for each thread
        known = !bound && !sched_getaffinity(0, sizeof cpus, &cpus) ? CPU_COUNT(&cpus) : MOST_MEMBERS;
        asked = time;
    }
    return known;
#else
    return MOST_MEMBERS;
#endif
}

// As many members as were asked for, unless fewer CPUs may be used: others would only be waited for.
inline int allowed(int members) {
    if (omp_in_parallel()) return 1;
    members = std::min({members, MOST_MEMBERS, omp_get_thread_limit()});
    if (const int cpus = pretended_cpus.load(std::memory_order_relaxed)) return std::min(members, cpus);
    return std::max(std::min(members, cpus_of_thread()), 1);
}

// What a leader shares its work by.
class Team {
   public:
    const int members;
    const bool is_together;  // so that short stages can be shared; else a member may have no core for long
    Team(Board& board, int members, bool is_together)
        : members(members), is_together(is_together), board(board) {}

    template <typename Work>
    void share(const Work& work) {
        if (members == 1) return work(0, 0);
        board.share(members, spin(), work);
    }

    // Do `work(index, member)` for all of a number of things, which threads take one by one.
    template <typename Work>
    void each(long count, const Work& work) {
        if (count > 1 && members > 1) return board.each(members, count, spin(), work);
        for (long i = 0; i < count; ++i) work(i, 0);
    }

   private:
    Board& board;

    Nanoseconds spin() const { return is_together ? SPIN_ALONE : SPIN_BUSY; }
};

// Run `lead(team)`, in a team of at most so many threads.
template <typename Lead>
void in_team(int members, const Lead& lead) {
    members = allowed(members);
    if (members == 1) {
        Board board;
        Team team(board, 1, true);
        return lead(team);
    }
    const Nanoseconds start = now();
    Nanoseconds waited = 0;  // for helpers
    // threads that OpenMP binds would hand their one CPU down to ours
    if (omp_get_proc_bind() != omp_proc_bind_false || !is_busy()) {
        Board board;
        Nanoseconds end = 0;
#pragma omp parallel num_threads(members)
        if (omp_get_thread_num() == 0) {
            Team team(board, omp_get_num_threads(), true);
            lead(team);
            board.close();
            waited = board.slept;
            end = now();
        } else {
            board.help(omp_get_thread_num(), SPIN_ALONE, false);
        }
        waited += now() - end;
    } else {
        Pool& pool = Pool::instance();
        std::unique_lock<std::mutex> only(pool.leader, std::try_to_lock);
        Board own;  // where another leader has the helpers
        if (only) pool.grow(members);
        Team team(only ? pool.board : own, members, false);
        lead(team);
    }
    if (now() - start > LOST && (waited > LOST || waited_for_core() > LOST)) note_loss(start);
}

}  // namespace

extern "C" {

// Whether others wanted the cores of late.
int32_t torchpact_is_busy() { return is_busy(); }

// Set how many threads torch uses when it is called by this thread; return how many it has used.
int32_t torchpact_torch_threads(int32_t count) {
    const int before = omp_get_max_threads();
    omp_set_num_threads(count);
    return before;
}

// For tests: as if there were so many CPUs, and the machine were busy for ever, or not; 0 CPUs: as it is.
void torchpact_pretend(int32_t cpus, int32_t busy) {
    pretended_cpus.store(cpus);
    busy_until.store(busy ? INT64_MAX : 0);
}
}
