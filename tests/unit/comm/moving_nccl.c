/* A library with NCCL's ABI that really moves bytes between processes, through files that they map.
 *
 * An id names a file in $STANDIN_DIR; a communicator is that file mapped: a barrier and one area a rank. Calls block
 * until they are done and end with an error once the communicator is revoked here or aborted by anybody. A file named
 * "hang" in $STANDIN_DIR makes revoke and abort hang. -DNO_REVOKE, -DNO_SHRINK, -DNO_GROW leave functions out. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 16, AREA = 1 << 20, REMOTE = 6, INVALID = 4, MISUSE = 5 };

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { volatile int arrived, generation, aborted; volatile int opened; } Head;
typedef struct { Head head; volatile uint64_t mail[MOST][MOST]; char areas[MOST][AREA]; char letters[MOST][MOST][1 << 16]; } Shared;
typedef struct { int size, rank; volatile int revoked; int grows; char name[100]; Shared* shared; } *ncclComm_t;

static int made, depth;
static struct { int kind, peer, done; const char* from; char* to; size_t bytes, at; ncclComm_t comm; } queue[256];
static int queued;

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

static int open_comm(ncclComm_t* out, const char* name, int size, int rank) {
  char path[300];
  if (size < 1 || size > MOST || rank < 0 || rank >= size) return INVALID;
  snprintf(path, sizeof path, "%s/%s", folder(), name);
  const int fd = open(path, O_RDWR | O_CREAT, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Shared))) return INVALID;
  ncclComm_t c = calloc(1, sizeof *c);
  c->size = size;
  c->rank = rank;
  snprintf(c->name, sizeof c->name, "%s", name);
  c->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  __sync_add_and_fetch(&c->shared->head.opened, 1);
  for (int i = 0; c->shared->head.opened < size; i++) {
    if (i > 500000 || dead(c)) return REMOTE;
    usleep(20);
  }
  *out = c;
  return 0;
}

int ncclCommInitRank(ncclComm_t* comm, int size, ncclUniqueId id, int rank) { return open_comm(comm, id.internal, size, rank); }

int ncclCommAbort(ncclComm_t c) {
  maybe_hang();
  c->revoked = 1; /* the memory stays: a thread may still be inside */
  return 0;
}

static size_t width(int type) { return type < 2 ? 1 : type < 4 || type == 7 ? 4 : type == 6 || type == 9 ? 2 : 8; }

static int fold(char* into, const char* from, size_t count, int type, int op) {
#define LOOP(T) for (size_t i = 0; i < count; i++) { T* a = (T*)into + i; T b = ((const T*)from)[i]; \
    *a = op == 0 ? *a + b : op == 1 ? *a * b : op == 2 ? (*a > b ? *a : b) : (*a < b ? *a : b); } return 0
  switch (type) {
    case 2: LOOP(int32_t);
    case 4: LOOP(int64_t);
    case 7: LOOP(float);
    case 8: LOOP(double);
    default: return INVALID;
  }
}

/* root < 0: everybody gets the result; op < 0: the root's bytes, not a sum. */
static int collective(const char* from, char* to, size_t count, int type, int op, int root, ncclComm_t c) {
  const size_t unit = width(type), step = AREA / unit;
  if (dead(c)) return REMOTE;
  for (size_t at = 0; at < count || at == 0; at += step) {
    const size_t n = count - at < step ? count - at : step;
    memcpy(c->shared->areas[c->rank], from + at * unit, n * unit);
    if (barrier(c)) return REMOTE;
    if (op < 0) {
      memcpy(to + at * unit, c->shared->areas[root], n * unit);
    } else if (root < 0 || root == c->rank) {
      memcpy(to + at * unit, c->shared->areas[0], n * unit);
      for (int r = 1; r < c->size; r++) {
        if (fold(to + at * unit, c->shared->areas[r], n, type, op)) return INVALID;
      }
    }
    if (barrier(c)) return REMOTE;
    if (count == 0) break;
  }
  return 0;
}

int ncclAllReduce(const void* f, void* t, size_t n, int type, int op, ncclComm_t c, void* s) { return collective(f, t, n, type, op, -1, c); }
int ncclReduce(const void* f, void* t, size_t n, int type, int op, int root, ncclComm_t c, void* s) { return collective(f, t, n, type, op, root, c); }
int ncclBroadcast(const void* f, void* t, size_t n, int type, int root, ncclComm_t c, void* s) { return collective(f, t, n, type, -1, root, c); }

static int letter(int kind, int peer, const char* from, char* to, size_t bytes, ncclComm_t c) {
  const size_t most = sizeof c->shared->letters[0][0];
  for (size_t at = 0; at < bytes || at == 0; at += most) {
    const size_t n = bytes - at < most ? bytes - at : most;
    volatile uint64_t* full = kind ? &c->shared->mail[c->rank][peer] : &c->shared->mail[peer][c->rank];
    while ((*full != 0) == kind) {
      if (dead(c)) return REMOTE;
      usleep(20);
    }
    if (kind) memcpy(c->shared->letters[c->rank][peer], from + at, n);
    else memcpy(to + at, c->shared->letters[peer][c->rank], n);
    __sync_synchronize();
    *full = kind;
    if (bytes == 0) break;
  }
  return 0;
}

static int enqueue(int kind, int peer, const void* from, void* to, size_t count, int type, ncclComm_t c) {
  if (dead(c)) return REMOTE;
  if (!depth) return letter(kind, peer, from, to, count * width(type), c);
  queue[queued].kind = kind; queue[queued].peer = peer; queue[queued].from = from; queue[queued].to = to;
  queue[queued].done = 0; queue[queued].at = 0;
  queue[queued].bytes = count * width(type); queue[queued++].comm = c;
  return 0;
}

/* One letter of message i of the group, unless its box is not ready or an earlier message goes the same way. */
static int advance(int i) {
  ncclComm_t c = queue[i].comm;
  const size_t most = sizeof c->shared->letters[0][0], left = queue[i].bytes - queue[i].at, n = left < most ? left : most;
  const int kind = queue[i].kind, peer = queue[i].peer;
  for (int j = 0; j < i; j++) {
    if (!queue[j].done && queue[j].kind == kind && queue[j].peer == peer && queue[j].comm == c) return 0;
  }
  volatile uint64_t* full = kind ? &c->shared->mail[c->rank][peer] : &c->shared->mail[peer][c->rank];
  if ((*full != 0) == kind) return 0;
  if (kind) memcpy(c->shared->letters[c->rank][peer], queue[i].from + queue[i].at, n);
  else memcpy(queue[i].to + queue[i].at, c->shared->letters[peer][c->rank], n);
  __sync_synchronize();
  *full = kind;
  queue[i].at += n;
  queue[i].done = queue[i].at == queue[i].bytes;
  return 1;
}

int ncclSend(const void* f, size_t n, int type, int peer, ncclComm_t c, void* s) { return enqueue(1, peer, f, 0, n, type, c); }
int ncclRecv(void* t, size_t n, int type, int peer, ncclComm_t c, void* s) { return enqueue(0, peer, 0, t, n, type, c); }
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
  int code = 0;
  if (--depth) return 0;
  for (int left = queued; left > 0 && !code;) { /* all side by side: none waits for one that comes later */
    int moved = 0;
    left = 0;
    for (int i = 0; i < queued; i++) {
      if (queue[i].done) continue;
      if (dead(queue[i].comm)) code = REMOTE;
      else moved |= advance(i);
      left += !queue[i].done;
    }
    if (!moved) usleep(20);
  }
  queued = 0;
  return code;
}

#ifndef NO_REVOKE
int ncclCommRevoke(ncclComm_t c, int flags) {
  maybe_hang();
  c->revoked = 1;
  return 0;
}
#endif

#ifndef NO_SHRINK
int ncclCommShrink(ncclComm_t c, int* excluded, int count, ncclComm_t* out, void* config, int flags) {
  char name[100];
  int shift = 0, used = snprintf(name, sizeof name, "%.60s-", c->name);
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
