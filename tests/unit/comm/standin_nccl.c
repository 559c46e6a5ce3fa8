/* A library with NCCL's ABI for one process: checks the order of calls and logs them.
 * Nothing is transferred. -DNO_REVOKE, -DNO_SHRINK, -DNO_GROW leave functions out, as older versions do. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int size, rank, revoked, dead; char pending; } *ncclComm_t;

static char journal[4096];
static int hang, broken;

#define NOTE(...) snprintf(journal + strlen(journal), sizeof journal - strlen(journal), __VA_ARGS__)

const char* standin_log(void) { return journal; }
void standin_reset(int hang_in_revoke) { journal[0] = 0; hang = hang_in_revoke; broken = 0; }
void standin_break(int error) { broken = error; }

const char* ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : code == 5 ? "invalid usage" : "error"; }
int ncclGetVersion(int* version) { *version = 22999; return 0; }
int ncclGetUniqueId(ncclUniqueId* id) { memset(id, 'i', sizeof *id); NOTE("id;"); return 0; }

static int make(ncclComm_t* out, int size, int rank) {
  if (size < 1 || rank < 0 || rank >= size) return 4;
  *out = calloc(1, sizeof **out);
  (*out)->size = size;
  (*out)->rank = rank;
  return 0;
}

int ncclCommInitRank(ncclComm_t* comm, int nranks, ncclUniqueId id, int rank) {
  NOTE("init %d/%d %c;", rank, nranks, id.internal[0]);
  return make(comm, nranks, rank);
}

int ncclCommAbort(ncclComm_t comm) {
  NOTE("abort %d;", comm->size);
  if (comm->dead) return 5;
  comm->dead = 1;
  return 0;
}

int ncclCommGetAsyncError(ncclComm_t comm, int* error) {
  *error = broken;
  return comm->dead ? 5 : 0;
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, ncclComm_t comm, void* stream) {
  if (!comm || comm->dead || comm->revoked) return 5;
  NOTE("allreduce %zu %d %d;", count, type, op);
  return 0;
}

int ncclReduce(const void* from, void* to, size_t count, int type, int op, int root, ncclComm_t comm, void* stream) { return 5; }
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, void* stream) { return 5; }
int ncclSend(const void* from, size_t count, int type, int peer, ncclComm_t comm, void* stream) { return 5; }
int ncclRecv(void* to, size_t count, int type, int peer, ncclComm_t comm, void* stream) { return 5; }
int ncclGroupStart(void) { return 0; }
int ncclGroupEnd(void) { return 0; }

#ifndef NO_REVOKE
int ncclCommRevoke(ncclComm_t comm, int flags) {
  while (hang) sleep(1);
  if (flags || comm->revoked) return 4; /* as of NCCL 2.31 */
  if (comm->dead) return 5;
  comm->revoked = 1;
  NOTE("revoke;");
  return 0;
}
#endif

#ifndef NO_SHRINK
int ncclCommShrink(ncclComm_t comm, int* excluded, int count, ncclComm_t* out, void* config, int flags) {
  int shift = 0;
  if (comm->dead) return 5;
  NOTE("shrink -");
  for (int i = 0; i < count; i++) {
    if (excluded[i] < 0 || excluded[i] >= comm->size || excluded[i] == comm->rank) return 4;
    shift += excluded[i] < comm->rank;
    NOTE("%d%s", excluded[i], i + 1 < count ? "," : "");
  }
  NOTE(" flags %d;", flags);
  if (!comm->revoked && !(flags & 1)) return 5; /* operations could be in flight */
  return make(out, comm->size - count, comm->rank - shift);
}
#endif

#ifndef NO_GROW
int ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  if (comm->dead || comm->pending) return 5;
  comm->pending = 1;
  memset(id, 'g', sizeof *id);
  NOTE("grow id;");
  return 0;
}

int ncclCommGrow(ncclComm_t comm, int size, const ncclUniqueId* id, int rank, ncclComm_t* out, void* config) {
  NOTE("grow to %d%s%s;", size, comm ? " old" : " new", id ? " id" : "");
  if (!comm) return id ? make(out, size, rank) : 4;
  if (rank != -1 || size <= comm->size || comm->dead) return 4;
  return make(out, size, comm->rank);
}
#endif
