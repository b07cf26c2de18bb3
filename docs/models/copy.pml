/* One slot, one reader whose lease has expired, and memory that is not sequentially consistent.
 *
 * Mirrors   owner.py (loan, publish_slot), lease.py (is_intact), segment.py (fence); rule R1.
 * Bound     one slot, ROWS publishes of it; a header and a payload of two words each; a reader of any
 *           publish that begins at any moment after it and may be slow for ever.
 * Memory    a store waits in a buffer and comes out at any moment, in any order with others; loads of
 *           one step happen in any order; only a fence, and a message through a socket, order them.
 *           That allows more than x86 and Arm do between two words. How the processor and the runtime
 *           carry out a fence, and the order of a GPU's streams, are reasoned, not checked.
 */
#ifndef ROWS
#define ROWS 3
#endif

/* Words: two of the header (generation, sequence), two of the payload. */
#define GENERATION 0
#define SEQUENCE 1
#define FIRST 2
#define SECOND 3

byte memory[4];
bool is_buffered[4];   /* a store of the owner that the reader does not see yet */
byte buffered[4];
byte announced;        /* the newest row whose descriptor has been sent */
byte told;             /* the row that the reader is to copy, 0 for none */
byte copied[2], seen[2];
bool has_copied[2], has_seen[2];

/* The claims. check.py looks for their names; with FOCUS a run judges one of them alone. */
#ifdef FOCUS
#define CLAIM(name, holds) name = (holds); assert(FOCUS)
#else
#define CLAIM(name, holds) name = (holds); assert(name)
#endif
hidden byte accepted_copy_is_whole = 1, untouched_row_is_accepted = 1;

#define IS_FLUSHED (!is_buffered[0] && !is_buffered[1] && !is_buffered[2] && !is_buffered[3])

/* A word's newer store takes the place of its older one: a processor may drop what nobody saw. */
inline store(word, value) { d_step { buffered[word] = value; is_buffered[word] = 1 } }
inline fence() { IS_FLUSHED }

proctype Memory(byte word) {
end:
  do
  :: d_step { is_buffered[word] ->
       memory[word] = buffered[word]; is_buffered[word] = 0; buffered[word] = 0 }
  od }

proctype Owner() {
  byte row = 1;
  do
  :: row <= ROWS ->
#ifndef NO_INVALIDATION
     store(GENERATION, 0); store(SEQUENCE, 0);
#ifndef NO_FENCE_BEFORE_PAYLOAD
     fence();
#endif
#endif
     store(FIRST, row); store(SECOND, row);
     fence();
     store(GENERATION, row); store(SEQUENCE, row);
     fence(); /* the socket's */
     announced = row; row++
  :: else -> break
  od }

proctype Reader() {
  do
  :: atomic { !told && announced -> told = announced }
  :: told && !has_copied[0] -> d_step { copied[0] = memory[FIRST]; has_copied[0] = 1 }
  :: told && !has_copied[1] -> d_step { copied[1] = memory[SECOND]; has_copied[1] = 1 }
#ifdef NO_FENCE_BEFORE_CHECK
#define MAY_CHECK told
#else
#define MAY_CHECK (has_copied[0] && has_copied[1])
#endif
  :: MAY_CHECK && !has_seen[0] -> d_step { seen[0] = memory[GENERATION]; has_seen[0] = 1 }
  :: MAY_CHECK && !has_seen[1] -> d_step { seen[1] = memory[SEQUENCE]; has_seen[1] = 1 }
  :: d_step { has_seen[0] && has_seen[1] && has_copied[0] && has_copied[1] ->
       if
#ifdef NO_CHECK
       :: true ->
#else
       :: seen[0] == told && seen[1] == told ->
#endif
          CLAIM(accepted_copy_is_whole, copied[0] == told && copied[1] == told)
#ifndef NO_CHECK
       :: else ->
          CLAIM(untouched_row_is_accepted, told != announced || announced < ROWS)
#endif
       fi;
       told = 0; copied[0] = 0; copied[1] = 0; seen[0] = 0; seen[1] = 0;
       has_copied[0] = 0; has_copied[1] = 0; has_seen[0] = 0; has_seen[1] = 0 }
  :: announced == ROWS && !told -> break
  od }

init {
  atomic {
    run Owner(); run Reader();
    run Memory(0); run Memory(1); run Memory(2); run Memory(3)
  } }
