/* What is trained, and when a run is over: does every row end in weights that survive?
 *
 * Mirrors   ledger.py, sessions.py, protocol.py (Hello, Heartbeat, Release, Bye, end, drained),
 *           worker_protocol.py (hello, beat, bye, hear), the loops of target server and worker (R7,
 *           R8). One group.
 * Bound     two workers, a ring of two slots, three rows, channels of two messages (what finds one
 *           full is lost for free), and the budgets below. Worker 1 never crashes: one lives.
 * Left out  bytes, lease times and credit (slots.pml, credit.pml): a descriptor reaches its worker at
 *           any moment while the lease stands; messages carry no numbers.
 *
 * Time: a deadline that waits for the dead may pass at any moment; heartbeats, and releases that are
 * repeated, come when nothing else can happen (`timeout`).
 */
#ifndef CAP
#define CAP 2
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
#ifndef SKIP
#define SKIP 0          /* READY rows that are skipped, or poison */
#endif
#ifndef SAVE
#define SAVE 1          /* checkpoints before the stream is settled, of both workers together */
#endif
#ifndef WORKER_CRASH
#define WORKER_CRASH 0  /* of worker 0, which then stays away or begins again */
#endif
#ifndef OWNER_CRASH
#define OWNER_CRASH 0
#endif

#define ROWS 3
#define SLOTS 2
#define SESSIONS 5      /* more than a worker begins: 1 + a crash, a suspicion, owners, late Hellos */
#define IDLE_TICKS 8
#define BIT(n) (1 << (n))
#define ALL_ROWS (BIT(ROWS + 1) - 2)

mtype = { HELLO, BEAT, RELEASE, BYE, WELCOME, PULSE, REFUSED, END };
mtype = { UNSEEN, READY, LEASED, HELD, AWAITED, SETTLED };

/* session, ring_epoch; of a Hello what is held and what is committed, of a heartbeat and a Bye what is
 * committed, of a release row and lease; of a pulse settled_below, is_settled + 2 * is_drained */
chan to_owner[2] = [CAP] of { mtype, byte, byte, byte, byte };
chan to_worker[2] = [CAP] of { mtype, byte, byte, byte, byte };

/* The owner's memory. A row's place joins the ring's book (READY, LEASED) and the ledger's. */
byte epoch = 1, cursor = 1, writing;
bool has_ended, is_over;
mtype place[ROWS + 1] = UNSEEN;
byte holder[ROWS + 1], lease[ROWS + 1]; /* a session of LEASED and HELD rows; a count of leases */
byte adopted, queued;                   /* sets of rows */
byte live[2], ended[2], estates[2];     /* a session; sets of sessions */
byte claims[2 * SESSIONS], durable[2 * SESSIONS];

/* The workers' memory, and what is durable of it: the rows that a checkpoint lists, and those that its
 * weights contain. `held` is a lease that is being copied. */
byte session[2] = 1, welcome[2];
byte held[2], held_lease[2], held_session[2];
byte unanswered[2];                     /* rows whose release may be lost */
byte staged[2], consumed[2], committed[2], weights[2], below[2];
byte saved_list[2], saved_weights[2];
bool must_save[2], is_drained[2], is_dead[2], is_away[2], is_gone[2];

byte losses = LOSS, dups = DUP, reorders = REORDER, early = EARLY, suspects = SUSPECT;
byte skips = SKIP, saves = SAVE, worker_crashes = WORKER_CRASH, owner_crashes = OWNER_CRASH;
byte idle;
byte counted;                           /* rows that are skipped or poison */
byte given, again;                      /* rows that were published; that were given out again */
#if defined(CURSOR_AT_PUBLISH) || defined(CURSOR_AT_RELEASE)
byte cursor_file;
#endif
#define SURVIVES (saved_weights[0] | saved_weights[1] | counted)

/* The claims. check.py looks for their names; with FOCUS a run judges one of them alone. */
#ifdef FOCUS
#define CLAIM(name, holds) name = (holds); assert(FOCUS)
#else
#define CLAIM(name, holds) name = (holds); assert(name)
#endif
hidden byte every_row_survives = 1, settled_row_survives = 1, drained_means_that_all_survives = 1;
hidden byte trained_twice_only_if_given_twice = 1, told_row_is_not_captured_again = 1;
hidden byte something_happens_in_time = 1;

/* Scratch, set before use in each step. */
hidden mtype kind;
hidden byte m_session, m_epoch, m_first, m_second;
hidden byte w, k, j, id, wanted;

inline tell_worker(v, type, a, b, c, d) {
  if
  :: nfull(to_worker[v]) -> to_worker[v]!type, a, b, c, d
  :: full(to_worker[v])
  fi }

inline tell_owner(v, type, a, b, c, d) {
  if
  :: nfull(to_owner[v]) -> to_owner[v]!type, a, b, c, d
  :: full(to_owner[v])
  fi }

inline drain(c) {
  do
  :: nempty(c) -> c?_, _, _, _, _
  :: empty(c) -> break
  od }

/* ---- the owner: ledger.py ---- */

#define ID(v, n) ((v) * SESSIONS + (n)) /* sessions begin at 1: 0 is nobody */

inline settle(r) {
  CLAIM(settled_row_survives, (SURVIVES & BIT(r)) != 0);
  place[r] = SETTLED; holder[r] = 0; adopted = adopted & ~BIT(r); queued = queued & ~BIT(r);
  idle = 0 }

inline hold(r, i) {
  place[r] = HELD; holder[r] = i;
  if :: durable[i] & BIT(r) -> settle(r) :: else fi }

inline commit(i, rows) {
  durable[i] = rows; j = 1;
  do
  :: j <= ROWS -> if :: place[j] == HELD && holder[j] == i && (rows & BIT(j)) -> settle(j) :: else fi; j++
  :: j > ROWS -> break
  od }

inline lose(i) {
  claims[i] = 0; durable[i] = 0; j = 1;
  do
  :: j <= ROWS ->
     if
     :: place[j] == HELD && holder[j] == i ->
        place[j] = AWAITED; holder[j] = 0; queued = queued | BIT(j); idle = 0
     :: else
     fi;
     j++
  :: j > ROWS -> break
  od }

#ifdef NO_CLAIMS
#define CLAIMS(i, r) false
#else
#define CLAIMS(i, r) ((claims[i] & BIT(r)) != 0)
#endif

inline greet(i, rows) {
  claims[i] = rows; j = 1;
  do
  :: j <= ROWS ->
     if
     :: place[j] == AWAITED && CLAIMS(i, j) -> queued = queued & ~BIT(j); hold(j, i)
     :: place[j] == READY && CLAIMS(i, j) -> hold(j, i)
     :: else
     fi;
     j++
  :: j > ROWS -> break
  od }

/* Whether the row is to be published; a row that a session claims is opened in its name. */
inline lacks(r) {
  wanted = (place[r] == AWAITED || place[r] == UNSEEN);
  if
  :: place[r] == UNSEEN ->
     k = 1;
     do
     :: k < 2 * SESSIONS ->
        if
        :: wanted && CLAIMS(k, r) ->
           wanted = 0; adopted = adopted | BIT(r); hold(r, k)
        :: else
        fi;
        k++
     :: else -> break
     od
  :: else
  fi }

/* ---- the owner: protocol.py ---- */

#define IN_RING ((place[1] == READY) + (place[1] == LEASED) + (place[2] == READY) + \
    (place[2] == LEASED) + (place[3] == READY) + (place[3] == LEASED) + (writing != 0))
#define ANY(p) (place[1] == p || place[2] == p || place[3] == p)
#define IS_SETTLED (has_ended && IN_RING == 0 && !ANY(AWAITED) && !estates[0] && !estates[1])
#ifdef DRAINED_WHEN_RELEASED
#define IS_DRAINED IS_SETTLED
#else
#define IS_DRAINED (IS_SETTLED && !ANY(HELD))
#endif
#define BELOW (place[1] != SETTLED -> 0 : (place[2] != SETTLED -> BIT(1) : \
    (place[3] != SETTLED -> BIT(1) | BIT(2) : ALL_ROWS)))
#define LEASES(i) ((place[1] == LEASED && holder[1] == i) || \
    (place[2] == LEASED && holder[2] == i) || (place[3] == LEASED && holder[3] == i))
#define MAY(r, v) (place[r] == READY && live[v] && !LEASES(ID(v, live[v])))

inline assign(r, v) { place[r] = LEASED; holder[r] = ID(v, live[v]); lease[r]++; idle = 0 }

inline grant() {
  do
  :: MAY(1, 0) -> d_step { assign(1, 0) }
  :: MAY(1, 1) -> d_step { assign(1, 1) }
  :: MAY(2, 0) -> d_step { assign(2, 0) }
  :: MAY(2, 1) -> d_step { assign(2, 1) }
  :: MAY(3, 0) -> d_step { assign(3, 0) }
  :: MAY(3, 1) -> d_step { assign(3, 1) }
  :: !(MAY(1, 0) || MAY(1, 1) || MAY(2, 0) || MAY(2, 1) || MAY(3, 0) || MAY(3, 1)) -> break
  od }

inline requeue(r) { place[r] = READY; holder[r] = 0; again = again | BIT(r); idle = 0 }

inline reclaim(i) {
  j = 1;
  do
  :: j <= ROWS -> if :: place[j] == LEASED && holder[j] == i -> requeue(j) :: else fi; j++
  :: j > ROWS -> break
  od }

#define HOLDS_FOR(i) (claims[i] || (place[1] == HELD && holder[1] == i) || \
    (place[2] == HELD && holder[2] == i) || (place[3] == HELD && holder[3] == i))

inline end_session(v) {
  id = ID(v, live[v]);
  reclaim(id);
  ended[v] = ended[v] | BIT(live[v]);
  if
  :: HOLDS_FOR(id) -> estates[v] = estates[v] | BIT(live[v])
  :: else -> lose(id)
  fi;
  live[v] = 0; idle = 0 }

inline give_up(v) {
  k = 1;
  do
  :: k < SESSIONS && (estates[v] & BIT(k)) -> lose(ID(v, k)); k++
  :: k < SESSIONS && !(estates[v] & BIT(k)) -> k++
  :: k >= SESSIONS -> break
  od;
  estates[v] = 0; idle = 0 }

inline refuse() { tell_worker(w, REFUSED, m_session, epoch, 0, 0) }

inline on_hello() {
  if
  :: ended[w] & BIT(m_session) -> refuse()
  :: else ->
     if
     :: live[w] == m_session
     :: else ->
        if :: live[w] -> end_session(w) :: else fi;
        live[w] = m_session; idle = 0;
        give_up(w);
        id = ID(w, m_session); greet(id, m_first); commit(id, m_second)
     fi;
     tell_worker(w, WELCOME, m_session, epoch, 0, 0)
  fi }

inline on_heartbeat() {
  id = ID(w, m_session); commit(id, m_second);
  m_first = BELOW;
  m_second = IS_SETTLED + 2 * IS_DRAINED;
  tell_worker(w, PULSE, m_session, epoch, m_first, m_second) }

inline on_release() {
  id = ID(w, m_session);
  if
  :: place[m_first] == LEASED && holder[m_first] == id && lease[m_first] == m_second ->
     idle = 0;
#ifdef CURSOR_AT_RELEASE
     cursor_file = cursor_file | BIT(m_first);
#endif
#ifdef RELEASE_CONSUMES
     settle(m_first)
#else
     hold(m_first, id)
#endif
  :: else
  fi }

inline on_bye() {
  id = ID(w, m_session);
  commit(id, m_second); reclaim(id); ended[w] = ended[w] | BIT(m_session); live[w] = 0; lose(id);
  idle = 0 }

inline receive(v) {
  w = v;
  to_owner[w]?kind, m_session, m_epoch, m_first, m_second;
  if
  :: kind == HELLO -> on_hello()
  :: kind != HELLO && !(live[w] == m_session && m_epoch == epoch) -> refuse()
  :: kind == BEAT && live[w] == m_session && m_epoch == epoch -> on_heartbeat()
  :: kind == RELEASE && live[w] == m_session && m_epoch == epoch -> on_release()
  :: kind == BYE && live[w] == m_session && m_epoch == epoch -> on_bye()
  fi }

/* ---- the owner: the target server's loop and RecipeBook ---- */

#define LOWEST (queued & BIT(1) -> 1 : (queued & BIT(2) -> 2 : 3))

inline choose() {
  if
  :: queued -> writing = LOWEST; queued = queued & ~BIT(writing)
  :: !queued ->
     do
     :: cursor <= ROWS && !writing ->
        lacks(cursor);
        if :: wanted -> writing = cursor :: else fi;
        cursor++
     :: cursor > ROWS || writing -> break
     od;
     if :: !writing -> has_ended = 1; idle = 0 :: else fi
  fi }

#define TOLD(v) (live[v] && (claims[ID(v, live[v])] & BIT(writing)))
/* A row can be trained twice where a lease or a session ended: then one death may ask for it again. */
#define IS_HURT (early < EARLY || suspects < SUSPECT || worker_crashes < WORKER_CRASH)

inline publish() {
  lacks(writing);
  if
  :: wanted ->
     CLAIM(told_row_is_not_captured_again, IS_HURT || !(TOLD(0) || TOLD(1)));
     place[writing] = READY; holder[writing] = 0; adopted = adopted & ~BIT(writing);
     queued = queued & ~BIT(writing);
     again = again | (given & BIT(writing)); given = given | BIT(writing);
#ifdef CURSOR_AT_PUBLISH
     cursor_file = cursor_file | BIT(writing);
#endif
     idle = 0
  :: else
  fi;
  writing = 0
#ifdef END_AT_LAST_PUBLISH
  ;
  if
  :: cursor > ROWS && !ANY(UNSEEN) && !has_ended ->
     has_ended = 1;
     if :: live[0] -> tell_worker(0, END, live[0], epoch, 0, 0) :: else fi;
     if :: live[1] -> tell_worker(1, END, live[1], epoch, 0, 0) :: else fi
  :: else
  fi
#endif
  }

inline crash_owner() {
  j = 1;
  do
  :: j <= ROWS ->
#if defined(CURSOR_AT_PUBLISH) || defined(CURSOR_AT_RELEASE)
     place[j] = ((cursor_file & BIT(j)) -> SETTLED : UNSEEN);
#else
     place[j] = (((saved_list[0] | saved_list[1]) & BIT(j)) -> SETTLED : UNSEEN);
#endif
     holder[j] = 0; lease[j] = 0; j++
  :: j > ROWS -> break
  od;
  j = 0;
  do
  :: j < 2 * SESSIONS -> claims[j] = 0; durable[j] = 0; j++
  :: j >= 2 * SESSIONS -> break
  od;
  live[0] = 0; live[1] = 0; ended[0] = 0; ended[1] = 0; estates[0] = 0; estates[1] = 0;
  epoch++; cursor = 1; writing = 0; has_ended = 0; adopted = 0; queued = 0; idle = 0 }

#define HAS_ROW (queued || cursor <= ROWS || !has_ended)

proctype Owner() {
end:
  do
  :: d_step { !is_over && !writing && IN_RING < SLOTS && HAS_ROW -> choose() }
  :: atomic { writing -> d_step { publish() }; grant() }
  :: atomic { nempty(to_owner[0]) && !is_over -> d_step { receive(0) }; grant() }
  :: atomic { nempty(to_owner[1]) && !is_over -> d_step { receive(1) }; grant() }
  :: d_step { estates[0] -> give_up(0) }
  :: d_step { estates[1] -> give_up(1) }
  :: atomic { live[0] && !is_over && (is_dead[0] || is_gone[0]) -> d_step { end_session(0) }; grant() }
  :: atomic { live[1] && !is_over && is_gone[1] -> d_step { end_session(1) }; grant() }
  :: d_step { !is_over && IS_DRAINED && !live[0] && !live[1] -> is_over = 1; idle = 0 }
#if SUSPECT
  :: atomic { suspects > 0 && live[0] -> d_step { suspects--; end_session(0) }; grant() }
  :: atomic { suspects > 0 && live[1] -> d_step { suspects--; end_session(1) }; grant() }
#endif
#if EARLY
  :: atomic { early > 0 && place[1] == LEASED -> d_step { early--; requeue(1) }; grant() }
  :: atomic { early > 0 && place[2] == LEASED -> d_step { early--; requeue(2) }; grant() }
  :: atomic { early > 0 && place[3] == LEASED -> d_step { early--; requeue(3) }; grant() }
#endif
#if SKIP
  :: d_step { skips > 0 && place[1] == READY -> skips--; counted = counted | BIT(1); settle(1) }
  :: d_step { skips > 0 && place[2] == READY -> skips--; counted = counted | BIT(2); settle(2) }
#endif
#if OWNER_CRASH
  :: d_step { owner_crashes > 0 && !is_over -> owner_crashes--; crash_owner() }
#endif
  od }

/* ---- the workers ---- */

inline say_hello(v) {
  tell_owner(v, HELLO, session[v], 0, consumed[v] | staged[v] | below[v], committed[v] | below[v]) }

inline beat(v) { tell_owner(v, BEAT, session[v], welcome[v], 0, committed[v] | below[v]) }

inline begin_session(v) { session[v]++; welcome[v] = 0; unanswered[v] = 0 }

inline save(v) {
#ifdef COMMIT_BEFORE_SAVE
  committed[v] = consumed[v];
#else
#ifdef STAGED_IS_CONSUMED
  saved_list[v] = consumed[v] | staged[v] | below[v];
#else
  saved_list[v] = consumed[v] | below[v];
#endif
  saved_weights[v] = weights[v]; committed[v] = saved_list[v];
#endif
  must_save[v] = 0; idle = 0; beat(v) }

inline hear(v) {
  to_worker[v]?kind, m_session, m_epoch, m_first, m_second;
  if
  :: kind == WELCOME && m_session == session[v] && !welcome[v] -> welcome[v] = m_epoch; idle = 0
  :: kind == REFUSED && m_session == session[v] -> begin_session(v); say_hello(v); idle = 0
  :: kind == PULSE && m_session == session[v] && m_epoch == welcome[v] ->
     below[v] = below[v] | m_first;
     must_save[v] = (m_second & 1);
     if
     :: (m_second & 2) && !is_drained[v] ->
        CLAIM(drained_means_that_all_survives, SURVIVES == ALL_ROWS);
        is_drained[v] = 1; idle = 0
     :: else
     fi
#ifdef END_AT_LAST_PUBLISH
  :: kind == END && m_session == session[v] -> is_drained[v] = 1; must_save[v] = 1; idle = 0
#endif
  :: else
  fi }

/* The lease that stands in the worker's name, where it is not answered. */
#define IS_GIVEN(r, v) (place[r] == LEASED && welcome[v] == epoch && live[v] == session[v] && \
    holder[r] == ID(v, session[v]) && !(unanswered[v] & BIT(r)))

inline take(r, v) { held[v] = r; held_lease[v] = lease[r]; held_session[v] = session[v] }

inline finish(v) {
  if
  :: held_session[v] == session[v] && !((consumed[v] | below[v]) & BIT(held[v])) ->
     staged[v] = staged[v] | BIT(held[v])
  :: else
  fi;
  if
  :: held_session[v] == session[v] ->
     unanswered[v] = unanswered[v] | BIT(held[v]);
     tell_owner(v, RELEASE, session[v], welcome[v], held[v], held_lease[v])
  :: else
  fi;
  held[v] = 0; held_lease[v] = 0; held_session[v] = 0; idle = 0 }

inline train(v) {
  weights[v] = weights[v] | staged[v]; consumed[v] = consumed[v] | staged[v]; staged[v] = 0; idle = 0 }

inline leave(v) {
  tell_owner(v, BYE, session[v], welcome[v], 0, committed[v] | below[v]);
  is_gone[v] = 1; idle = 0 }

inline crash_worker(v) {
  worker_crashes--; begin_session(v); drain(to_worker[v]); is_dead[v] = 1;
  held[v] = 0; held_lease[v] = 0; held_session[v] = 0; staged[v] = 0; must_save[v] = 0;
  is_drained[v] = 0; below[v] = 0;
  consumed[v] = saved_list[v]; committed[v] = saved_list[v]; weights[v] = saved_weights[v] }

#define IS_UP(v) (!is_dead[v] && !is_gone[v])
#define IS_IDLE(v) (!held[v] && !staged[v])

proctype Worker(byte v) {
end:
  do
  :: d_step { nempty(to_worker[v]) && IS_UP(v) -> hear(v) }
  :: d_step { IS_UP(v) && !held[v] && IS_GIVEN(1, v) -> take(1, v) }
  :: d_step { IS_UP(v) && !held[v] && IS_GIVEN(2, v) -> take(2, v) }
  :: d_step { IS_UP(v) && !held[v] && IS_GIVEN(3, v) -> take(3, v) }
  :: d_step { IS_UP(v) && held[v] -> finish(v) }
  :: d_step { IS_UP(v) && staged[v] -> train(v) }
  :: d_step { IS_UP(v) && saves > 0 && committed[v] != consumed[v] -> saves--; save(v) }
  :: d_step { IS_UP(v) && must_save[v] && IS_IDLE(v) && (committed[v] | below[v]) != (consumed[v] | below[v])
       -> save(v) }
  :: d_step { IS_UP(v) && is_drained[v] && IS_IDLE(v) && (committed[v] | below[v]) == (consumed[v] | below[v])
       -> leave(v) }
  :: d_step { IS_UP(v) && is_over && IS_IDLE(v) && saved_weights[v] != weights[v] -> save(v) }
#if WORKER_CRASH
  :: atomic { v == 0 && worker_crashes > 0 && IS_UP(v) ->
       d_step { crash_worker(v) };
       if :: skip :: is_away[v] = 1 fi }
  :: d_step { is_dead[v] && !is_away[v] && !is_over -> is_dead[v] = 0; drain(to_worker[v]); say_hello(v) }
#endif
  od }

/* ---- what lies between them, and time ---- */

inline lose_message(c) { losses--; idle = 0; c?_, _, _, _, _ }

inline repeat(c) {
  dups--;
  c?<kind, m_session, m_epoch, m_first, m_second>; c!kind, m_session, m_epoch, m_first, m_second }

inline overtake(c) {
  reorders--;
  c?kind, m_session, m_epoch, m_first, m_second; c!kind, m_session, m_epoch, m_first, m_second }

#if LOSS || DUP || REORDER
proctype Network(chan c) {
end:
  do
#if LOSS
  :: d_step { losses > 0 && nempty(c) -> lose_message(c) }
#endif
#if DUP
  :: d_step { dups > 0 && nempty(c) && nfull(c) -> repeat(c) }
#endif
#if REORDER
  :: d_step { reorders > 0 && len(c) > 1 -> overtake(c) }
#endif
  od }
#endif

/* R3: an answer that is lost is repeated, since its lease is still on record. */
inline answer_again(r, v) {
  if
  :: place[r] == LEASED && live[v] == session[v] && holder[r] == ID(v, session[v]) &&
     (unanswered[v] & BIT(r)) -> tell_owner(v, RELEASE, session[v], welcome[v], r, lease[r])
  :: else
  fi }

inline tick() {
  idle++;
  CLAIM(something_happens_in_time, idle < IDLE_TICKS);
  k = 0;
  do
  :: k < 2 ->
     if
     :: IS_UP(k) && welcome[k] ->
        beat(k); answer_again(1, k); answer_again(2, k); answer_again(3, k)
     :: IS_UP(k) && !welcome[k] -> say_hello(k)
     :: else
     fi;
     k++
  :: k >= 2 -> break
  od;
  k = 0 }

inline audit() {
  CLAIM(every_row_survives, SURVIVES == ALL_ROWS);
  CLAIM(trained_twice_only_if_given_twice, !(saved_weights[0] & saved_weights[1] & ~again)) }

proctype Clock() {
  do
  :: timeout ->
     if
     :: is_over -> d_step { audit() }; break
     :: else -> d_step { tick() }
     fi
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
