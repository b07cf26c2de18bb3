/* Slots, leases and sessions: is every row that counts as taken a whole copy of the right row?
 *
 * Mirrors   book.py, sessions.py, protocol.py (Hello, Heartbeat, Release, Nack, tick, grant),
 *           worker_protocol.py (take, finish, begin_session), owner.py and lease.py (R1). One group.
 * Bound     two workers with one staging buffer each, two slots, three rows, a payload of two words,
 *           channels of two messages (what finds one full is lost for free), and the budgets below.
 * Left out  message numbers and buffers that wait for a step (credit.pml), checkpoints (rows.pml;
 *           here a row that is copied is trained at once), the order of memory (copy.pml).
 *
 * Time: what takes long happens when nothing else can (`timeout`), in ticks of one heartbeat
 * interval. EARLY and SUSPECT let a deadline pass before the messages that would have moved it.
 */
#ifndef ROWS
#define ROWS 3
#endif
#ifndef CAP
#define CAP 2
#endif
#ifndef MAX_ATTEMPTS
#define MAX_ATTEMPTS 3
#endif
/* Budgets: how often each fault may happen in one run. */
#ifndef LOSS
#define LOSS 0          /* messages lost */
#endif
#ifndef DUP
#define DUP 0           /* messages that come again, behind all that is on its way */
#endif
#ifndef REORDER
#define REORDER 0       /* messages overtaken by all that is on its way */
#endif
#ifndef EARLY
#define EARLY 0         /* leases that expire while their worker is slow */
#endif
#ifndef SUSPECT
#define SUSPECT 0       /* sessions ended as silent while their worker lives */
#endif
#ifndef EXTRA
#define EXTRA 0         /* heartbeats between ticks */
#endif
#ifndef HANG
#define HANG 0          /* copies that never end, while the heartbeats of their process go on */
#endif
#ifndef BAD
#define BAD 0           /* copies that fail for another reason than a rewritten slot */
#endif
#ifndef UNSENT
#define UNSENT 0        /* descriptors, the first or a repeated one, that the owner's socket refuses */
#endif
#ifndef SKIP
#define SKIP 0          /* READY rows skipped by the group's policy */
#endif
#ifndef WORKER_CRASH
#define WORKER_CRASH 0  /* of worker 0, which then stays away or begins again */
#endif
#ifndef OWNER_CRASH
#define OWNER_CRASH 0
#endif

#define SLOTS 2
#define LEASE_TICKS 4   /* lease_seconds: more heartbeats than LOSS can take */
#define RENEWALS 2      /* lease_max_seconds */
#define SESSION_TICKS 4 /* session_timeout_seconds */
#define IDLE_TICKS 12   /* longer than every deadline */
#define BIT(n) (1 << (n))
#define AT(e, s) (((e) - 1) * SLOTS + (s))
#define ALL_ROWS (BIT(ROWS + 1) - 2)

mtype = { HELLO, BEAT, RELEASE, NACK, TORN, WELCOME, DESC, REFUSED };
mtype = { FREE, WRITING, READY, LEASED };

/* session, ring_epoch, slot, generation, lease, then capacity to the owner, the row to a worker */
chan to_owner[2] = [CAP] of { mtype, byte, byte, byte, byte, byte, byte };
chan to_worker[2] = [CAP] of { mtype, byte, byte, byte, byte, byte, byte };

/* Segments, one for each life of the owner. A header's generation stands for its sequence too. */
byte header[(1 + OWNER_CRASH) * SLOTS];
byte first[(1 + OWNER_CRASH) * SLOTS], second[(1 + OWNER_CRASH) * SLOTS];

/* The owner's memory. */
byte epoch = 1, next_row = 1, last_lease, writing;
bool is_half_written;
mtype state[SLOTS] = FREE;
byte generation[SLOTS], row[SLOTS], attempts[SLOTS], avoid[SLOTS];
byte lease[SLOTS], leased_to[SLOTS], lease_session[SLOTS], age[SLOTS], renewed[SLOTS];
byte live[2], ended[2], owed[2], capacity[2], silent[2];
byte released, poison, skipped, settled; /* sets of rows */

/* The workers' memory. `held` is a lease without an answer: `stage` is 1 while it waits, 2 while
 * it is copied, 3 where the copy hangs. `answered` and `accepted` are outcomes by lease. */
byte session[2] = 1, welcome[2];
byte held[2], stage[2], held_session[2], held_epoch[2], held_slot[2], held_generation[2];
byte held_row[2];
bool is_right[2];
short answered[2], accepted[2];
bool is_dead[2], is_away[2];

byte losses = LOSS, dups = DUP, reorders = REORDER, early = EARLY, suspects = SUSPECT;
byte extras = EXTRA, hangs = HANG, bads = BAD, unsents = UNSENT, skips = SKIP;
byte worker_crashes = WORKER_CRASH, owner_crashes = OWNER_CRASH;
byte idle;
byte took[2]; /* rows of this ring_epoch that a worker accepted: the books are held against it */
#define TAKEN (took[0] | took[1])
/* Whether something worse than lost, repeated and overtaken messages has happened. */
#define IS_HURT (early < EARLY || suspects < SUSPECT || hangs < HANG || bads < BAD || \
    unsents < UNSENT || worker_crashes < WORKER_CRASH || owner_crashes < OWNER_CRASH)

/* The claims. check.py looks for their names; with FOCUS a run judges one of them alone. */
#ifdef FOCUS
#define CLAIM(name, holds) name = (holds); assert(FOCUS)
#else
#define CLAIM(name, holds) name = (holds); assert(name)
#endif
hidden byte accepted_copy_is_whole = 1, released_row_was_accepted = 1;
hidden byte answer_ends_its_own_lease = 1, torn_nack_is_stale = 1, heartbeat_moves_no_lease = 1;
hidden byte released_once_and_not_poison = 1, every_row_ends = 1, books_balance = 1;
hidden byte lost_messages_cost_no_attempt = 1, lost_messages_train_no_row_twice = 1;
hidden byte something_happens_in_time = 1;

/* Scratch, set before use in each step. */
hidden mtype kind;
hidden byte m_session, m_epoch, m_slot, m_generation, m_lease, m_last;
hidden byte w, s, k, j;

inline tell_worker(v, type, a, b, c, d, e, f) {
  if
  :: nfull(to_worker[v]) -> to_worker[v]!type, a, b, c, d, e, f
  :: full(to_worker[v])
  fi }

inline tell_owner(v, type, a, b, c, d, e, f) {
  if
  :: nfull(to_owner[v]) -> to_owner[v]!type, a, b, c, d, e, f
  :: full(to_owner[v])
  fi }

inline drain(c) {
  do
  :: nempty(c) -> c?_, _, _, _, _, _, _
  :: empty(c) -> break
  od }

/* ---- the owner: book.py ---- */

inline describe(n) {
  tell_worker(leased_to[n], DESC, lease_session[n], epoch, n, generation[n], lease[n], row[n]) }

inline end_lease(n) {
  lease[n] = 0; leased_to[n] = 0; lease_session[n] = 0; age[n] = 0; renewed[n] = 0 }

inline free_slot(n) {
  end_lease(n); state[n] = FREE; row[n] = 0; attempts[n] = 0; avoid[n] = 0 }

inline loan(n) {
  state[n] = WRITING; writing = n + 1;
#ifndef NO_INVALIDATION
  header[AT(epoch, n)] = 0;
#endif
  first[AT(epoch, n)] = next_row }

inline next() {
  next_row++;
  do
  :: next_row <= ROWS && (settled & BIT(next_row)) -> next_row++
  :: else -> break
  od }

inline publish() {
  s = writing - 1; generation[s]++; header[AT(epoch, s)] = generation[s];
  state[s] = READY; row[s] = next_row; writing = 0; is_half_written = 0; idle = 0; next() }

inline requeue(n, counted) {
  CLAIM(lost_messages_cost_no_attempt, IS_HURT);
  idle = 0; attempts[n] = attempts[n] + counted; avoid[n] = lease_session[n] * 2 + leased_to[n];
  if
  :: attempts[n] >= MAX_ATTEMPTS -> poison = poison | BIT(row[n]); free_slot(n)
  :: else -> end_lease(n); state[n] = READY
  fi }

inline skip_row(n) {
  skips--; skipped = skipped | BIT(row[n]); idle = 0; free_slot(n) }

/* ---- the owner: protocol.py ---- */

#define IS_HELD_BY(n, v) (state[n] == LEASED && leased_to[n] == v && lease_session[n] == live[v])
#define LOAD(v) (IS_HELD_BY(0, v) + IS_HELD_BY(1, v))
#define IS_OPEN(v) (live[v] && owed[v] == 0 && capacity[v] > LOAD(v))
#define MAY(n, v) (state[n] == READY && IS_OPEN(v) && \
    !(avoid[n] == live[v] * 2 + v && IS_OPEN(0) && IS_OPEN(1)))
#define CAN_GRANT (MAY(0, 0) || MAY(0, 1) || MAY(1, 0) || MAY(1, 1))

inline assign(n, v) {
  last_lease++; idle = 0;
  state[n] = LEASED; lease[n] = last_lease; leased_to[n] = v; lease_session[n] = live[v];
  age[n] = 0; renewed[n] = 0 }

/* Which of two idle sessions, or of two rows, comes first is left open. */
inline grant() {
  do
  :: MAY(0, 0) -> d_step { assign(0, 0); describe(0) }
  :: MAY(0, 1) -> d_step { assign(0, 1); describe(0) }
  :: MAY(1, 0) -> d_step { assign(1, 0); describe(1) }
  :: MAY(1, 1) -> d_step { assign(1, 1); describe(1) }
  :: !CAN_GRANT -> break
  od }

inline expire(n) {
#ifndef IGNORE_DEBT
  if :: live[leased_to[n]] == lease_session[n] -> owed[leased_to[n]] = lease[n] :: else fi;
#endif
  requeue(n, 1) }

inline end_session(v) {
  k = 0;
  do
  :: k < SLOTS -> if :: IS_HELD_BY(k, v) -> requeue(k, 1) :: else fi; k++
  :: else -> break
  od;
  ended[v] = ended[v] | BIT(live[v]); live[v] = 0; owed[v] = 0; capacity[v] = 0; silent[v] = 0;
  idle = 0 }

#ifdef NO_EPOCH
#define SPEAKS (live[w] && live[w] == m_session)
#else
#define SPEAKS (live[w] && live[w] == m_session && m_epoch == epoch)
#endif
#if defined(RELEASE_BY_SLOT)
#define IS_CURRENT (state[m_slot] == LEASED)
#elif defined(RELEASE_BY_GENERATION)
#define IS_CURRENT (state[m_slot] == LEASED && generation[m_slot] == m_generation)
#else
#define IS_CURRENT (IS_HELD_BY(m_slot, w) && generation[m_slot] == m_generation && \
    lease[m_slot] == m_lease)
#endif

inline refuse() { tell_worker(w, REFUSED, m_session, epoch, 0, 0, 0, 0) }

inline on_hello() {
  if
  :: ended[w] & BIT(m_session) -> refuse()
  :: else ->
     if
     :: live[w] == m_session
     :: live[w] != m_session && live[w] -> end_session(w); live[w] = m_session
     :: live[w] == 0 -> live[w] = m_session; idle = 0
     fi;
     capacity[w] = m_last; silent[w] = 0;
     tell_worker(w, WELCOME, m_session, epoch, 0, 0, 0, 0)
  fi }

inline renew(n) {
#ifdef RENEWAL_WITHOUT_CAP
  age[n] = 0
#else
  if :: renewed[n] < RENEWALS -> renewed[n]++; age[n] = 0 :: else fi
#endif
  }

/* A current lease that its session's heartbeat lacks. */
inline heal(n) {
#if defined(REQUEUE_ON_LOSS)
  requeue(n, 1)
#elif defined(NO_RESEND)
  skip
#else
  describe(n);
#ifdef DEBTOR_IS_RENEWED
  age[n] = 0; renewed[n] = 0
#else
  if :: owed[w] == 0 -> age[n] = 0; renewed[n] = 0 :: else fi
#endif
#endif
  }

inline take_over() {
  if
  :: m_lease && generation[m_slot] == m_generation &&
     (state[m_slot] == LEASED || state[m_slot] == READY) ->
     CLAIM(heartbeat_moves_no_lease, IS_HELD_BY(m_slot, w) && lease[m_slot] == m_lease);
     state[m_slot] = LEASED; leased_to[m_slot] = w; lease_session[m_slot] = m_session;
     lease[m_slot] = m_lease
  :: else
  fi }

inline on_heartbeat() {
  silent[w] = 0; capacity[w] = m_last;
#ifdef HEARTBEAT_TAKES_OVER
  take_over();
#endif
#if defined(IGNORE_DEBT)
  owed[w] = 0;
#elif defined(OLD_HEARTBEAT_PAYS)
  if :: owed[w] != m_lease -> owed[w] = 0 :: else fi;
#else
  owed[w] = ((m_lease && !IS_CURRENT) -> m_lease : 0);
#endif
  k = 0;
  do
  :: k < SLOTS ->
     if
     :: IS_HELD_BY(k, w) && k == m_slot && IS_CURRENT -> renew(k)
     :: IS_HELD_BY(k, w) && !(k == m_slot && IS_CURRENT) -> heal(k)
     :: !IS_HELD_BY(k, w)
     fi;
     k++
  :: else -> break
  od }

inline on_answer() {
  if :: owed[w] == m_lease -> owed[w] = 0 :: else fi;
  capacity[w] = m_last; silent[w] = 0;
  if
  :: IS_CURRENT ->
     if
     :: kind == RELEASE ->
        CLAIM(released_row_was_accepted, (took[w] & BIT(row[m_slot])) != 0);
        CLAIM(answer_ends_its_own_lease, lease[m_slot] == m_lease);
        CLAIM(released_once_and_not_poison, !((poison | released) & BIT(row[m_slot])));
        released = released | BIT(row[m_slot]); idle = 0; free_slot(m_slot)
     :: else ->
        CLAIM(answer_ends_its_own_lease, lease[m_slot] == m_lease);
        CLAIM(torn_nack_is_stale, kind == NACK);
        requeue(m_slot, 1)
     fi
  :: else
  fi }

inline receive(v) {
  w = v;
  to_owner[w]?kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last;
  if
  :: kind == HELLO -> on_hello()
  :: kind != HELLO && !SPEAKS -> refuse()
  :: kind == BEAT && SPEAKS -> on_heartbeat()
  :: kind != HELLO && kind != BEAT && SPEAKS -> on_answer()
  fi }

/* The end of a life. Descriptors on their way are lost: to take one afterwards is as good as to have
 * taken it before. What nobody copies is cleared, for there to be fewer states. */
inline crash_owner() {
  k = 0;
  do
  :: k < SLOTS ->
     free_slot(k); generation[k] = 0;
     if
     :: (stage[0] && held_epoch[0] == epoch && held_slot[0] == k) ||
        (stage[1] && held_epoch[1] == epoch && held_slot[1] == k)
     :: else -> header[AT(epoch, k)] = 0; first[AT(epoch, k)] = 0; second[AT(epoch, k)] = 0
     fi;
     k++
  :: else -> break
  od;
  drain(to_worker[0]); drain(to_worker[1]);
  k = 0;
  do
  :: k < 2 -> live[k] = 0; ended[k] = 0; owed[k] = 0; capacity[k] = 0; silent[k] = 0; k++
  :: else -> break
  od;
  epoch++; last_lease = 0; writing = 0; is_half_written = 0; released = 0; poison = 0; skipped = 0;
  idle = 0 }

proctype Owner() {
end:
  do
  :: d_step { next_row <= ROWS && !writing && state[0] == FREE -> loan(0) }
  :: d_step { next_row <= ROWS && !writing && state[1] == FREE -> loan(1) }
  :: d_step { writing && !is_half_written ->
       second[AT(epoch, writing - 1)] = next_row; is_half_written = 1 }
  :: atomic { writing && is_half_written -> d_step { publish() }; grant() }
  :: atomic { nempty(to_owner[0]) -> d_step { receive(0) }; grant() }
  :: atomic { nempty(to_owner[1]) -> d_step { receive(1) }; grant() }
#if EARLY
  :: atomic { early > 0 && state[0] == LEASED -> d_step { early--; expire(0) }; grant() }
  :: atomic { early > 0 && state[1] == LEASED -> d_step { early--; expire(1) }; grant() }
#endif
#if UNSENT
  :: atomic { unsents > 0 && state[0] == LEASED -> d_step { unsents--; requeue(0, 0) }; grant() }
  :: atomic { unsents > 0 && state[1] == LEASED -> d_step { unsents--; requeue(1, 0) }; grant() }
#endif
#if SUSPECT
  :: atomic { suspects > 0 && live[0] -> d_step { suspects--; end_session(0) }; grant() }
  :: atomic { suspects > 0 && live[1] -> d_step { suspects--; end_session(1) }; grant() }
#endif
#if SKIP
  :: d_step { skips > 0 && state[0] == READY -> skip_row(0) }
  :: d_step { skips > 0 && state[1] == READY -> skip_row(1) }
#endif
#if OWNER_CRASH
  :: atomic { owner_crashes > 0 ->
       d_step { owner_crashes--; crash_owner(); j = 1 };
       do /* what checkpoints hold is settled: any part of what was accepted */
       :: j <= ROWS && (TAKEN & BIT(j)) -> settled = settled | BIT(j); j++
       :: j <= ROWS -> j++
       :: j > ROWS -> break
       od;
       d_step { took[0] = 0; took[1] = 0; next_row = 0; next(); j = 0 } }
#endif
  od }

/* ---- the workers: worker_protocol.py ---- */

/* A buffer that a copy under an ended session's lease occupies is not told as capacity. */
#define IS_VOID(v) (held[v] && held_session[v] != session[v])
#define ROOM(v) (1 - IS_VOID(v))
#ifdef FORGET_OUTCOMES
#define IS_ANSWERED(v) false
#else
#define IS_ANSWERED(v) (answered[v] & BIT(m_lease))
#endif
#ifdef NO_EPOCH
#define IS_MINE(v) (m_session == session[v] && welcome[v])
#else
#define IS_MINE(v) (m_session == session[v] && welcome[v] == m_epoch)
#endif
#ifdef NO_CHECK
#define IS_INTACT(v) true
#else
#define IS_INTACT(v) (header[AT(held_epoch[v], held_slot[v])] == held_generation[v])
#endif

/* No buffer is offered before the segment is attached; the heartbeat after it tells them. */
inline say_hello(v) { tell_owner(v, HELLO, session[v], 0, 0, 0, 0, 0) }

inline beat(v) {
  if
  :: held[v] && !IS_VOID(v) ->
     tell_owner(v, BEAT, session[v], welcome[v], held_slot[v], held_generation[v], held[v], 1)
  :: else -> tell_owner(v, BEAT, session[v], welcome[v], 0, 0, 0, ROOM(v))
  fi }

inline forget(v) {
  held[v] = 0; stage[v] = 0; held_session[v] = 0; held_epoch[v] = 0; held_slot[v] = 0;
  held_generation[v] = 0; held_row[v] = 0; is_right[v] = 0 }

inline begin_session(v) {
  session[v]++; welcome[v] = 0; answered[v] = 0; accepted[v] = 0;
  if :: stage[v] == 1 -> forget(v) :: else fi }

inline take(v) {
  if
  :: IS_MINE(v) && IS_ANSWERED(v) && (accepted[v] & BIT(m_lease)) ->
     tell_owner(v, RELEASE, m_session, m_epoch, m_slot, m_generation, m_lease, ROOM(v))
  :: IS_MINE(v) && IS_ANSWERED(v) && !(accepted[v] & BIT(m_lease)) ->
     tell_owner(v, NACK, m_session, m_epoch, m_slot, m_generation, m_lease, ROOM(v))
  :: IS_MINE(v) && !IS_ANSWERED(v) && !held[v] ->
     held[v] = m_lease; stage[v] = 1; held_session[v] = m_session; held_epoch[v] = welcome[v];
     held_slot[v] = m_slot; held_generation[v] = m_generation; held_row[v] = m_last
  :: else
  fi }

inline hear(v) {
  to_worker[v]?kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last;
  if
  :: kind == DESC -> take(v)
  :: kind == WELCOME && m_session == session[v] && !welcome[v] ->
     welcome[v] = m_epoch; idle = 0; beat(v)
  :: kind == REFUSED && m_session == session[v] -> begin_session(v); say_hello(v); idle = 0
  :: else
  fi }

inline accept(v) {
  CLAIM(accepted_copy_is_whole, is_right[v] &&
      second[AT(held_epoch[v], held_slot[v])] == held_row[v]);
  CLAIM(lost_messages_train_no_row_twice, IS_HURT || !(TAKEN & BIT(held_row[v])));
  if :: held_epoch[v] == epoch -> took[v] = took[v] | BIT(held_row[v]) :: else fi;
  idle = 0 }

inline finish(v, type) {
  if
  :: held_session[v] == session[v] ->
     answered[v] = answered[v] | BIT(held[v]);
     if :: type == RELEASE -> accepted[v] = accepted[v] | BIT(held[v]) :: else fi;
     tell_owner(v, type, session[v], held_epoch[v], held_slot[v], held_generation[v], held[v], 1)
  :: else
  fi;
  forget(v) }

proctype Worker(byte v) {
end:
  do
  :: d_step { nempty(to_worker[v]) && !is_dead[v] -> hear(v) }
  :: d_step { stage[v] == 1 ->
       is_right[v] = (first[AT(held_epoch[v], held_slot[v])] == held_row[v]); stage[v] = 2 }
  :: d_step { stage[v] == 2 -> /* R1: the copy is over when the header is read */
       if
       :: IS_INTACT(v) -> accept(v); finish(v, RELEASE)
       :: else -> finish(v, TORN)
       fi }
#if BAD
  :: d_step { stage[v] == 2 && bads > 0 && IS_INTACT(v) -> bads--; finish(v, NACK) }
#endif
#if HANG
  :: d_step { stage[v] == 2 && hangs > 0 -> hangs--; stage[v] = 3 }
#endif
#if EXTRA
  :: d_step { extras > 0 && welcome[v] -> extras--; beat(v) }
#endif
#if WORKER_CRASH
  :: atomic { v == 0 && worker_crashes > 0 && !is_dead[v] ->
       d_step { worker_crashes--; forget(v); begin_session(v); drain(to_worker[v]) };
       if :: is_dead[v] = 1 :: d_step { is_dead[v] = 1; is_away[v] = 1 } fi }
  :: d_step { is_dead[v] && !is_away[v] -> is_dead[v] = 0; drain(to_worker[v]); say_hello(v) }
#endif
  od }

/* ---- what lies between them, and time ---- */

inline lose(c) { losses--; idle = 0; c?_, _, _, _, _, _, _ }

inline repeat(c) {
  dups--;
  c?<kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last>;
  c!kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last }

inline overtake(c) {
  reorders--;
  c?kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last;
  c!kind, m_session, m_epoch, m_slot, m_generation, m_lease, m_last }

#if LOSS || DUP || REORDER
proctype Network(chan c) {
end:
  do
#if LOSS
  :: d_step { losses > 0 && nempty(c) -> lose(c) }
#endif
#if DUP
  :: d_step { dups > 0 && nempty(c) && nfull(c) -> repeat(c) }
#endif
#if REORDER
  :: d_step { reorders > 0 && len(c) > 1 -> overtake(c) }
#endif
  od }
#endif

inline tick() {
  idle++;
  CLAIM(something_happens_in_time, idle < IDLE_TICKS);
  j = 0;
  do
  :: j < SLOTS && state[j] == LEASED ->
     age[j]++;
     if :: age[j] >= LEASE_TICKS -> expire(j) :: else fi;
     j++
  :: j < SLOTS && state[j] != LEASED -> j++
  :: j >= SLOTS -> break
  od;
  j = 0;
  do
  :: j < 2 ->
     if
     :: live[j] -> silent[j]++; if :: silent[j] >= SESSION_TICKS -> end_session(j) :: else fi
     :: else
     fi;
     if
     :: !is_dead[j] && welcome[j] -> beat(j)
     :: !is_dead[j] && !welcome[j] -> say_hello(j)
     :: is_dead[j]
     fi;
     j++
  :: else -> break
  od }

inline audit() {
  CLAIM(every_row_ends, (TAKEN | settled | poison | skipped) == ALL_ROWS);
  CLAIM(books_balance, state[0] == FREE && state[1] == FREE &&
      !(released & poison) && !(released & skipped) && !(poison & skipped)) }

proctype Clock() {
  do
  :: timeout ->
     atomic {
       if
       :: (released | poison | skipped | settled) == ALL_ROWS -> d_step { audit() }; break
       :: else -> d_step { tick() }; grant()
       fi }
  od }

init {
  atomic {
    say_hello(0); say_hello(1);
    run Owner(); run Worker(0); run Worker(1); run Clock();
#if LOSS || DUP || REORDER
    run Network(to_owner[0]); run Network(to_owner[1]);
    run Network(to_worker[0]); run Network(to_worker[1])
#endif
  } }
