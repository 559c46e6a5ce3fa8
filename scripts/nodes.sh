# shellcheck shell=bash
# The store through which the launchers of several nodes meet; sourced by pretrain_gpt_cuda.sh and pretrain_gpt_ascend.sh.
#
#   MASTER_ADDR, MASTER_PORT     node 0 serves the job's store. If node 0 fails, the job ends with status 4.
#   ETCD_ENDPOINT, RUN_ID        the store is etcd, HOST:2379[,HOST:2379...]; any node may fail. RUN_ID names the job.
#   ETCD_CONF                    options for --rdzv-conf, e.g. protocol=https,ca_cert=FILE
#   JOIN_TIMEOUT                 seconds to wait for the other nodes at the start (default 600), then status 1

# shellcheck disable=SC2034 # both are used by the scripts that source this
# elastic_nodes NODES NODE_RANK: sets NODE_ARGS, the launcher's arguments, and MIRRORS.
elastic_nodes() {
    NODE_ARGS=(--nnodes "$1" --node-rank "$2")
    local conf=${JOIN_TIMEOUT:+join_timeout=$JOIN_TIMEOUT}
    if [[ -n "${ETCD_ENDPOINT:-}" ]]; then
        NODE_ARGS+=(--rdzv-backend etcd --rdzv-endpoint "$ETCD_ENDPOINT")
        NODE_ARGS+=(--rdzv-id "${RUN_ID:?RUN_ID, a name for the job that no other job in etcd has}")
        conf+=${ETCD_CONF:+${conf:+,}$ETCD_CONF}
    else
        NODE_ARGS+=(--master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-6000}")
    fi
    [[ -z "$conf" ]] || NODE_ARGS+=(--rdzv-conf "$conf")
    # One copy on another node survives the loss of a node; two copies, from three nodes on, that of any two.
    MIRRORS=${MIRRORS:-$(($1 > 2 ? 2 : 1))}
}

# elastic_launch ARGUMENTS...: replaces this shell by the launcher. Does not return.
elastic_launch() {
    # A pod of Kubernetes is started again under the same name. etcd forgets a run 30 s after its last launcher ended;
    # before that a new launcher would find the run that is over.
    if [[ -z "${ETCD_ENDPOINT:-}" || $$ -ne 1 ]]; then
        exec python -m megatron.elastic.launch "$@"
    fi
    local launcher status signalled
    python -m megatron.elastic.launch "$@" &
    launcher=$!
    trap 'signalled=1; kill -TERM "$launcher" 2>/dev/null' TERM # process 1 of a pod is the only one that is signalled
    while :; do
        signalled=0 status=0
        wait "$launcher" || status=$?
        [[ $signalled -eq 1 ]] || break # else a signal ended the wait, not the launcher
    done
    case "$status" in
        3 | 4) sleep "${ETCD_FORGETS_SECONDS:-40}" ;;
    esac
    exit "$status"
}
