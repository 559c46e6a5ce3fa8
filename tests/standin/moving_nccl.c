/* A library with NCCL's ABI that really moves bytes between processes, through files that they map.
 *
 * An id names a file in $STANDIN_DIR; a communicator is that file mapped: a barrier and one area a rank. Calls block
 * until they are done and end with an error once the communicator is revoked here or aborted by anybody. A file named
 * "hang" in $STANDIN_DIR makes revoke and abort hang. A file "die-2of3" there kills the first process that connects as
 * rank 2 of 3, before it is there: the others wait for it without a limit, as NCCL's do. One named "broken-2of3" breaks
 * the communicator of that rank, as a closed socket does: a revoke does not mend that, and a shrink is refused. A root of
 * a broadcast and the others of a reduction are done when their bytes are on their way, as in NCCL. -DNO_REVOKE, -DNO_SHRINK, -DNO_GROW leave functions out.
 *
 * With -DON_STREAMS it is the library of the stand-in accelerator: operations are enqueued on the stream that is given
 * and end, as NCCL's kernels do, when they are done or their communicator is revoked. Others wait for them, so a stream
 * that holds its work back runs up to them. An abort then waits for all operations of its device, those of other
 * communicators too: it frees memory there. */
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 16, DEVICES = 16, AREA = 1 << 20, PARCEL = 1 << 16, REMOTE = 6, INVALID = 4, MISUSE = 5 };

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { volatile int arrived, generation, aborted; volatile int opened; } Head;
typedef struct { Head head; volatile uint64_t mail[MOST][MOST]; char areas[MOST][AREA]; char letters[MOST][MOST][PARCEL]; volatile uint64_t sent[MOST][MOST]; char parcels[MOST][MOST][PARCEL]; } Shared;
typedef struct { int size, rank, device, broken; volatile int revoked; int grows; char name[100]; Shared* shared; } *ncclComm_t;
typedef struct { int kind, peer, done; const char* from; char* to; size_t bytes, at; ncclComm_t comm; } Message;
typedef struct { const char* from; char* to; size_t count; int type, op, root; ncclComm_t comm; } Collective;
typedef struct { int count; Message messages[]; } Batch;

static int made;
static __thread int depth, queued;
static __thread Message queue[256];
static __thread void* group_stream;

#ifdef ON_STREAMS
void* standin_backing(const void* address);
int standin_device_of(const void* address);
int standin_enqueue_awaited(void* stream, void (*job)(void*), void* argument);
#define MEMORY(address) standin_backing(address)
typedef struct { int (*job)(void*); void* argument; int device; } Launched;
static volatile int flying[DEVICES]; /* operations of this process that each device has not done */

static void run_launched(void* argument) {
  const Launched one = *(Launched*)argument;
  free(argument);
  one.job(one.argument);
  __sync_sub_and_fetch(&flying[one.device], 1);
}
#else
#define MEMORY(address) ((void*)(address))
#endif

/* Run `job` on a copy of its argument, which it frees: at once, or in the order of the stream. `memory`: of its device. */
static int launch(void* stream, int (*job)(void*), const void* argument, size_t bytes, const void* memory, ncclComm_t c) {
  void* copy = memcpy(malloc(bytes), argument, bytes);
#ifdef ON_STREAMS
  Launched* one = malloc(sizeof *one);
  *one = (Launched){job, copy, c->device = standin_device_of(memory)};
  __sync_add_and_fetch(&flying[one->device], 1);
  return standin_enqueue_awaited(stream, run_launched, one) ? INVALID : 0;
#else
  return job(copy);
#endif
}

static const char* folder(void) { return getenv("STANDIN_DIR") ? getenv("STANDIN_DIR") : "/tmp"; }

static void maybe_hang(void) {
  char path[300];
  snprintf(path, sizeof path, "%s/hang", folder());
  while (access(path, F_OK) == 0) usleep(10000);
}

const char* ncclGetErrorString(int code) { return code == REMOTE ? "remote process exited or there was a network error" : "invalid usage"; }
int ncclGetVersion(int* version) { *version = 22999; return 0; }
int ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 100, "id-%d-%d", getpid(), made++);
  return 0;
}

static int dead(ncclComm_t c) { return !c || c->revoked || c->shared->head.aborted; }

static int barrier(ncclComm_t c) {
  Head* h = &c->shared->head;
  const int generation = h->generation;
  if (__sync_add_and_fetch(&h->arrived, 1) == c->size) {
    h->arrived = 0;
    __sync_synchronize();
    h->generation = generation + 1;
    return 0;
  }
  while (h->generation == generation) {
    if (dead(c)) return REMOTE;
    usleep(20);
  }
  return 0;
}

static void maybe_die(int rank, int size) {
  char path[300];
  snprintf(path, sizeof path, "%s/die-%dof%d", folder(), rank, size);
  if (unlink(path) == 0) kill(getpid(), SIGKILL);
}

static int open_comm(ncclComm_t* out, const char* name, int size, int rank) {
  char path[300];
  if (size < 1 || size > MOST || rank < 0 || rank >= size) return INVALID;
  maybe_die(rank, size);
  snprintf(path, sizeof path, "%s/%s", folder(), name);
  const int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared))) return INVALID;
  ncclComm_t c = calloc(1, sizeof *c);
  c->size = size;
  c->rank = rank;
  c->device = -1;
  snprintf(c->name, sizeof c->name, "%s", name);
  c->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  __sync_add_and_fetch(&c->shared->head.opened, 1);
  for (int i = 0; c->shared->head.opened < size; i++) {
    if (dead(c)) return REMOTE;
    usleep(i < 50000 ? 20 : 1000);
  }
  *out = c;
  return 0;
}

int ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) { return open_comm(comm, id.internal, size, rank); }

int ncclCommAbort(ncclComm_t c) {
  maybe_hang();
  c->revoked = 1; /* the memory stays: a thread may still be inside */
#ifdef ON_STREAMS
  while (c->device >= 0 && flying[c->device] > 0) usleep(100);
#endif
  return 0;
}

static int broken(ncclComm_t c) {
  char path[300];
  snprintf(path, sizeof path, "%s/broken-%dof%d", folder(), c->rank, c->size);
  if (unlink(path) == 0) c->broken = 1;
  return c->broken;
}

int ncclCommGetAsyncError(ncclComm_t c, int* error) {
  *error = broken(c) ? REMOTE : 0;
  return 0;
}

static size_t width(int type) { return type < 2 ? 1 : type < 4 || type == 7 ? 4 : type == 6 || type == 9 ? 2 : 8; }

static float wide(uint16_t value) { /* of bf16 */
  const uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}

static uint16_t narrow(float value) { /* to the nearest, ties to even */
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return 0x7FC0;
  return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static int fold(char* into, const char* from, size_t count, int type, int op) {
  if (op > 3) return INVALID;
#define LOOP(T) for (size_t i = 0; i < count; i++) { T* a = (T*)into + i; T b = ((const T*)from)[i]; \
    *a = op == 0 ? *a + b : op == 1 ? *a * b : op == 2 ? (*a > b ? *a : b) : (*a < b ? *a : b); } return 0
  switch (type) {
    case 2: LOOP(int32_t);
    case 4: LOOP(int64_t);
    case 7: LOOP(float);
    case 8: LOOP(double);
    case 9:
      for (size_t i = 0; i < count; i++) {
        const float a = wide(((uint16_t*)into)[i]), b = wide(((const uint16_t*)from)[i]);
        ((uint16_t*)into)[i] = narrow(op == 0 ? a + b : op == 1 ? a * b : op == 2 ? (a > b ? a : b) : (a < b ? a : b));
      }
      return 0;
    default: return INVALID;
  }
}

/* Everybody gets the sum. */
static int move_all(const char* from, char* to, size_t count, int type, int op, ncclComm_t c) {
  const size_t unit = width(type), step = AREA / unit;
  if (dead(c)) return REMOTE;
  for (size_t at = 0; at < count || at == 0; at += step) {
    const size_t n = count - at < step ? count - at : step;
    memcpy(c->shared->areas[c->rank], from + at * unit, n * unit);
    if (barrier(c)) return REMOTE;
    memcpy(to + at * unit, c->shared->areas[0], n * unit);
    for (int r = 1; r < c->size; r++) {
      if (fold(to + at * unit, c->shared->areas[r], n, type, op)) return INVALID;
    }
    if (barrier(c)) return REMOTE;
    if (count == 0) break;
  }
  return 0;
}

/* Put a parcel on its way to a rank, where one can wait, or take the one that came from there. */
static int parcel(int sends, int peer, char* data, size_t bytes, ncclComm_t c) {
  const int from = sends ? c->rank : peer, to = sends ? peer : c->rank;
  volatile uint64_t* full = &c->shared->sent[from][to];
  while ((*full != 0) == sends) {
    if (dead(c)) return REMOTE;
    usleep(20);
  }
  if (sends) memcpy(c->shared->parcels[from][to], data, bytes);
  else memcpy(data, c->shared->parcels[from][to], bytes);
  __sync_synchronize();
  *full = (uint64_t)sends;
  return 0;
}

/* op < 0: the root's bytes to all, else the sum of all to the root. */
static int move_rooted(char* from, char* to, size_t count, int type, int op, int root, ncclComm_t c) {
  const size_t unit = width(type), step = PARCEL / unit;
  char sum[PARCEL], other[PARCEL];
  if (dead(c)) return REMOTE;
  for (size_t at = 0; at < count; at += step) {
    const size_t n = count - at < step ? count - at : step;
    char *source = from + at * unit, *target = to + at * unit;
    if (c->rank != root) {
      if (op < 0 ? parcel(0, root, target, n * unit, c) : parcel(1, root, source, n * unit, c)) return REMOTE;
      continue;
    }
    for (int r = 0; r < c->size; r++) {
      if (r != root && parcel(op < 0, r, op < 0 ? source : other, n * unit, c)) return REMOTE;
      if (op >= 0 && r == 0) memcpy(sum, r == root ? source : other, n * unit);
      else if (op >= 0 && fold(sum, r == root ? source : other, n, type, op)) return INVALID;
    }
    memmove(target, op < 0 ? source : sum, n * unit);
  }
  return 0;
}

static int run_collective(void* argument) {
  const Collective one = *(Collective*)argument;
  free(argument);
  char *from = MEMORY(one.from), *to = MEMORY(one.to);
  if (one.root < 0) return move_all(from, to, one.count, one.type, one.op, one.comm);
  return move_rooted(from, to, one.count, one.type, one.op, one.root, one.comm);
}

static int collective(const void* from, void* to, size_t count, int type, int op, int root, ncclComm_t c, void* stream) {
  const Collective one = {from, to, count, type, op, root, c};
  return dead(c) ? REMOTE : launch(stream, run_collective, &one, sizeof one, from, c);
}

int ncclAllReduce(const void* f, void* t, size_t n, int type, int op, ncclComm_t c, void* s) { return collective(f, t, n, type, op, -1, c, s); }
int ncclReduce(const void* f, void* t, size_t n, int type, int op, int root, ncclComm_t c, void* s) { return collective(f, t, n, type, op, root, c, s); }
int ncclBroadcast(const void* f, void* t, size_t n, int type, int root, ncclComm_t c, void* s) { return collective(f, t, n, type, -1, root, c, s); }

/* One letter of message i of the batch, unless its box is not ready or an earlier message goes the same way. */
static int advance(Batch* batch, int i) {
  Message* one = &batch->messages[i];
  ncclComm_t c = one->comm;
  const size_t most = sizeof c->shared->letters[0][0], left = one->bytes - one->at, n = left < most ? left : most;
  const int kind = one->kind, peer = one->peer;
  for (int j = 0; j < i; j++) {
    const Message* before = &batch->messages[j];
    if (!before->done && before->kind == kind && before->peer == peer && before->comm == c) return 0;
  }
  volatile uint64_t* full = kind ? &c->shared->mail[c->rank][peer] : &c->shared->mail[peer][c->rank];
  if ((*full != 0) == kind) return 0;
  if (kind) memcpy(c->shared->letters[c->rank][peer], (const char*)MEMORY(one->from) + one->at, n);
  else memcpy((char*)MEMORY(one->to) + one->at, c->shared->letters[peer][c->rank], n);
  __sync_synchronize();
  *full = kind;
  one->at += n;
  one->done = one->at == one->bytes;
  return 1;
}

/* All side by side: none waits for one that comes later. */
static int run_batch(void* argument) {
  Batch* batch = argument;
  int code = 0;
  for (int left = batch->count; left > 0 && !code;) {
    int moved = 0;
    left = 0;
    for (int i = 0; i < batch->count; i++) {
      if (batch->messages[i].done) continue;
      if (dead(batch->messages[i].comm)) code = REMOTE;
      else moved |= advance(batch, i);
      left += !batch->messages[i].done;
    }
    if (!moved) usleep(20);
  }
  free(batch);
  return code;
}

int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
  if (--depth || !queued) return 0;
  const size_t bytes = sizeof(Batch) + (size_t)queued * sizeof(Message);
  Batch* batch = malloc(bytes);
  batch->count = queued;
  memcpy(batch->messages, queue, (size_t)queued * sizeof(Message));
  const Message* first = &batch->messages[0];
  queued = 0;
  const int code = launch(group_stream, run_batch, batch, bytes, first->kind ? first->from : first->to, first->comm);
  free(batch);
  return code;
}

static int message(int kind, int peer, const void* from, void* to, size_t count, int type, ncclComm_t c, void* stream) {
  if (dead(c)) return REMOTE;
  ncclGroupStart();
  queue[queued++] = (Message){kind, peer, 0, from, to, count * width(type), 0, c};
  group_stream = stream;
  return ncclGroupEnd();
}

int ncclSend(const void* f, size_t n, int type, int peer, ncclComm_t c, void* s) { return message(1, peer, f, 0, n, type, c, s); }
int ncclRecv(void* t, size_t n, int type, int peer, ncclComm_t c, void* s) { return message(0, peer, 0, t, n, type, c, s); }

#ifndef NO_REVOKE
int ncclCommRevoke(ncclComm_t c, int flags) {
  maybe_hang();
  return __sync_lock_test_and_set(&c->revoked, 1) ? INVALID : 0; /* once, as NCCL 2.31 */
}
#endif

#ifndef NO_SHRINK
int ncclCommShrink(ncclComm_t c, int* excluded, int count, ncclComm_t* out, void* config, int flags) {
  char name[100];
  int shift = 0, used = snprintf(name, sizeof name, "%.60s-", c->name);
  if (broken(c)) return REMOTE;
  if (!c->revoked && !(flags & 1)) return MISUSE; /* operations could be in flight */
  for (int i = 0; i < count; i++) {
    if (excluded[i] == c->rank) return INVALID;
    shift += excluded[i] < c->rank;
    used += snprintf(name + used, sizeof name - used, "x%d", excluded[i]);
  }
  return open_comm(out, name, c->size - count, c->rank - shift);
}
#endif

#ifndef NO_GROW
int ncclCommGetUniqueId(ncclComm_t c, ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  snprintf(id->internal, 100, "grow-%d-%d", getpid(), made++);
  return c->revoked ? MISUSE : 0;
}
/* A grown communicator's file is named by the id, which the parent's other members learn from the first one's file. */
int ncclCommGrow(ncclComm_t c, int size, const ncclUniqueId* id, int rank, ncclComm_t* out, void* config) {
  char name[100];
  if (!c) return id ? open_comm(out, id->internal, size, rank) : INVALID;
  if (c->revoked || rank != -1 || size <= c->size) return MISUSE;
  if (id) memcpy(c->shared->areas[0], id->internal, 100);
  if (barrier(c)) return REMOTE;
  memcpy(name, c->shared->areas[0], 100);
  return open_comm(out, name, size, c->rank);
}
#endif
