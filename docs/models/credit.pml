/* Credit: does the owner's idea of a worker's free buffers stay true, whatever the channels do?
 *
 * Mirrors   protocol.py (numbers, capacity, debts, grant, heal), worker_protocol.py (take, finish,
 *           return_buffer, begin_session); Credit. One group.
 * Bound     one worker, since credit is a matter of one session, with two staging buffers; three rows,
 *           all in the ring; channels of three messages (what finds one full is lost for free), and
 *           the budgets below.
 * Left out  slots, bytes, lease times (slots.pml), checkpoints (rows.pml).
 *
 * A Welcome whose segment cannot be attached is as good as lost: the worker says Hello again.
 * Numbers: only their order counts, so both sides begin again at 0 when nothing is on its way.
 */
#ifndef CAP
#define CAP 3
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
#ifndef BAD
#define BAD 0           /* copies that fail */
#endif

#ifndef ROWS
#define ROWS 3
#endif
#define BUFFERS 2
#define IDLE_TICKS 8
#define BIT(n) (1 << (n))
#define COUNT(set) ((((set) >> 1) & 1) + (((set) >> 2) & 1) + (((set) >> 3) & 1) + \
    (((set) >> 4) & 1) + (((set) >> 5) & 1) + (((set) >> 6) & 1) + (((set) >> 7) & 1))

mtype = { HELLO, BEAT, CREDIT, RELEASE, NACK, WELCOME, DESC, REFUSED };

/* session, number, capacity, lease or set of leases; session, lease */
chan to_owner = [CAP] of { mtype, byte, byte, byte, byte };
chan to_worker = [CAP] of { mtype, byte, byte };

/* The owner's memory. Leases, record and owed are sets of lease ids. */
byte ready = ROWS, released, last_lease, record, owed;
byte live, ended, capacity, number;

/* The worker's memory. `copied` is the part of `held` that is being copied; buffers are busy from the
 * release to the step, and void while a copy under an ended session's lease goes on. */
byte session = 1, last_number, last_capacity, held, copied, answered, accepted, busy, num_void;
bool is_welcome;

byte losses = LOSS, dups = DUP, reorders = REORDER, early = EARLY, suspects = SUSPECT;
byte extras = EXTRA, bads = BAD;
byte idle;

/* The claims. check.py looks for their names; with FOCUS a run judges one of them alone. */
#ifdef FOCUS
#define CLAIM(name, holds) name = (holds); assert(FOCUS)
#else
#define CLAIM(name, holds) name = (holds); assert(name)
#endif
hidden byte no_buffer_is_filled_twice = 1, granted_lease_finds_room = 1;
hidden byte granted_row_can_be_read = 1, leases_stay_within_buffers = 1, credit_comes_back = 1, books_balance = 1;
hidden byte something_happens_in_time = 1;

/* Scratch, set before use in each step. */
hidden mtype kind;
hidden byte m_session, m_number, m_capacity, m_lease, k;

#define FREE_CAPACITY (BUFFERS - busy - num_void)

inline tell_worker(type, a, b) {
  if
  :: nfull(to_worker) -> to_worker!type, a, b
  :: full(to_worker)
  fi }

inline say(type, lease) {
  last_number++;
#if defined(BUSY_IS_CAPACITY)
  last_capacity = BUFFERS;
#elif defined(INCREMENTAL)
  last_capacity = (type == CREDIT);
#elif defined(HELLO_OFFERS)
  last_capacity = FREE_CAPACITY;
#else
  last_capacity = (type == HELLO -> 0 : FREE_CAPACITY);
#endif
  if
  :: nfull(to_owner) -> to_owner!type, session, last_number, last_capacity, lease
  :: full(to_owner)
  fi }

/* ---- the owner ---- */

#ifdef INCREMENTAL
#define AVAILABLE capacity /* counted down by a grant, up by a returned buffer */
#else
#define AVAILABLE (capacity > COUNT(record) -> capacity - COUNT(record) : 0)
#endif

inline grant() {
  do
  :: ready > 0 && live && owed == 0 && AVAILABLE > 0 ->
     ready--; last_lease++; record = record | BIT(last_lease); idle = 0;
#ifdef INCREMENTAL
     capacity--;
#endif
     CLAIM(leases_stay_within_buffers, COUNT(record) <= BUFFERS);
     CLAIM(granted_row_can_be_read, is_welcome || live != session);
     tell_worker(DESC, live, last_lease)
  :: else -> break
  od;
  k = 0 }

inline note_capacity() {
#if defined(INCREMENTAL)
  capacity = capacity + m_capacity
#elif defined(NO_NUMBERS)
  capacity = m_capacity
#else
  if :: m_number > number -> number = m_number; capacity = m_capacity :: else fi
#endif
  }

inline end_session() {
  ready = ready + COUNT(record); record = 0; owed = 0; ended = ended | BIT(live); live = 0; number = 0;
  idle = 0 }

inline on_hello() {
  if
  :: ended & BIT(m_session) -> tell_worker(REFUSED, m_session, 0)
  :: else ->
     if
     :: live == m_session -> note_capacity()
     :: else ->
        if :: live -> end_session() :: else fi;
        live = m_session; number = m_number; idle = 0;
#ifdef INCREMENTAL
        capacity = BUFFERS
#else
        capacity = m_capacity
#endif
     fi;
     tell_worker(WELCOME, m_session, 0)
  fi }

inline heal() {
  owed = m_lease & ~record; k = 1;
  do
  :: k <= last_lease ->
     if :: (record & ~m_lease) & BIT(k) -> tell_worker(DESC, live, k) :: else fi; k++
  :: else -> break
  od }

inline on_heartbeat() {
  if
#ifndef NO_NUMBERS
  :: m_number <= number
  :: m_number > number ->
#else
  :: true ->
#endif
#ifndef HEARTBEAT_WITHOUT_CAPACITY
     note_capacity();
#endif
     heal()
  fi }

inline on_answer() {
  note_capacity();
  owed = owed & ~BIT(m_lease);
  if
  :: record & BIT(m_lease) ->
     record = record & ~BIT(m_lease); idle = 0;
     if :: kind == RELEASE -> released++ :: else -> ready++ fi
  :: else
  fi }

inline receive() {
  to_owner?kind, m_session, m_number, m_capacity, m_lease;
  if
  :: kind == HELLO -> on_hello()
  :: kind != HELLO && live != m_session -> tell_worker(REFUSED, m_session, 0)
  :: kind == BEAT && live == m_session -> on_heartbeat()
  :: kind == CREDIT && live == m_session -> note_capacity()
  :: (kind == RELEASE || kind == NACK) && live == m_session -> on_answer()
  fi;
  if :: empty(to_owner) -> number = 0; last_number = 0 :: nempty(to_owner) fi;
  grant() }

inline expire(n) {
  early--; owed = owed | BIT(n); record = record & ~BIT(n); ready++; idle = 0;
  grant() }

proctype Owner() {
end:
  do
  :: d_step { nempty(to_owner) -> receive() }
#if EARLY
  :: d_step { early > 0 && (record & BIT(1)) -> expire(1) }
  :: d_step { early > 0 && (record & BIT(2)) -> expire(2) }
  :: d_step { early > 0 && (record & BIT(3)) -> expire(3) }
#endif
#if SUSPECT
  :: d_step { suspects > 0 && live -> suspects--; end_session() }
#endif
  od }

/* ---- the worker ---- */

inline begin_session() {
  session++; is_welcome = 0; last_number = 0; num_void = num_void + COUNT(copied);
  held = 0; copied = 0; answered = 0; accepted = 0 }

inline take() {
  if
  :: answered & BIT(m_lease) ->
     if :: accepted & BIT(m_lease) -> say(RELEASE, m_lease) :: else -> say(NACK, m_lease) fi
  :: !((answered | held) & BIT(m_lease)) ->
     CLAIM(granted_lease_finds_room, early < EARLY || COUNT(held) < FREE_CAPACITY);
     if
#ifdef TAKE_WITHOUT_ROOM
     :: true -> held = held | BIT(m_lease); idle = 0
#else
     :: COUNT(held) < FREE_CAPACITY -> held = held | BIT(m_lease); idle = 0
     :: COUNT(held) >= FREE_CAPACITY
#endif
     fi;
     CLAIM(no_buffer_is_filled_twice, COUNT(held) + busy + num_void <= BUFFERS)
  :: held & BIT(m_lease)
  fi }

inline hear() {
  to_worker?kind, m_session, m_lease;
  if
  :: kind == WELCOME && m_session == session && !is_welcome ->
     is_welcome = 1; idle = 0; say(BEAT, held)
  :: kind == REFUSED && m_session == session -> begin_session(); say(HELLO, 0); idle = 0
  :: kind == DESC && m_session == session && is_welcome -> take()
  :: else
  fi }

#define OLDEST(set) (((set) & 2) -> 1 : (((set) & 4) -> 2 : (((set) & 8) -> 3 : \
    (((set) & 16) -> 4 : (((set) & 32) -> 5 : (((set) & 64) -> 6 : 7))))))

inline copy() { k = OLDEST(held & ~copied); copied = copied | BIT(k) }

inline finish(n, type) {
  held = held & ~BIT(n); copied = copied & ~BIT(n); answered = answered | BIT(n);
  if :: type == RELEASE -> busy++; accepted = accepted | BIT(n) :: else fi;
  say(type, n); idle = 0 }

/* Told at once where the last capacity told leaves no buffer to fill. */
#ifdef INCREMENTAL
#define IS_SHORT true
#else
#define IS_SHORT (last_capacity <= COUNT(held))
#endif

inline return_buffer() {
  busy--; idle = 0;
  if :: is_welcome && IS_SHORT -> say(CREDIT, 0) :: else fi }

proctype Worker() {
end:
  do
  :: d_step { nempty(to_worker) -> hear() }
  :: d_step { held != copied -> copy() }
  :: d_step { copied -> k = OLDEST(copied); finish(k, RELEASE) }
#if BAD
  :: d_step { bads > 0 && copied -> bads--; k = OLDEST(copied); finish(k, NACK) }
#endif
  :: d_step { num_void > 0 -> num_void--; idle = 0 }
  :: d_step { busy > 0 -> return_buffer() }
#if EXTRA
  :: d_step { extras > 0 && is_welcome -> extras--; say(BEAT, held) }
#endif
  od }

/* ---- what lies between them, and time ---- */

#if LOSS || DUP || REORDER
proctype Network() {
end:
  do
#if LOSS
  :: d_step { losses > 0 && nempty(to_owner) -> losses--; idle = 0; to_owner?_, _, _, _, _ }
  :: d_step { losses > 0 && nempty(to_worker) -> losses--; idle = 0; to_worker?_, _, _ }
#endif
#if DUP
  :: d_step { dups > 0 && nempty(to_owner) && nfull(to_owner) -> dups--;
       to_owner?<kind, m_session, m_number, m_capacity, m_lease>;
       to_owner!kind, m_session, m_number, m_capacity, m_lease }
  :: d_step { dups > 0 && nempty(to_worker) && nfull(to_worker) -> dups--;
       to_worker?<kind, m_session, m_lease>; to_worker!kind, m_session, m_lease }
#endif
#if REORDER
  :: d_step { reorders > 0 && len(to_owner) > 1 -> reorders--;
       to_owner?kind, m_session, m_number, m_capacity, m_lease;
       to_owner!kind, m_session, m_number, m_capacity, m_lease }
  :: d_step { reorders > 0 && len(to_worker) > 1 -> reorders--;
       to_worker?kind, m_session, m_lease; to_worker!kind, m_session, m_lease }
#endif
  od }
#endif

#ifdef INCREMENTAL
#define CREDIT (capacity + COUNT(record))
#else
#define CREDIT capacity
#endif

inline tick() {
  idle++;
  CLAIM(something_happens_in_time, idle < IDLE_TICKS);
  /* A heartbeat has come through since the last change: what it said is what is. */
  CLAIM(credit_comes_back, idle < 3 || CREDIT == FREE_CAPACITY);
  if :: is_welcome -> say(BEAT, held) :: else -> say(HELLO, 0) fi }

inline audit() { CLAIM(books_balance, record == 0 && ready == 0 && released == ROWS) }

proctype Clock() {
  do
  :: timeout ->
     if
     :: idle >= 3 && released == ROWS -> d_step { audit() }; break
     :: else -> d_step { tick() }
     fi
  od }

init {
  atomic {
    d_step { say(HELLO, 0) };
    run Owner(); run Worker(); run Clock();
#if LOSS || DUP || REORDER
    run Network()
#endif
  } }
