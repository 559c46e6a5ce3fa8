"""A torchx component: elastic pretraining on any scheduler that torchx knows.

    component="$(megatron-elastic files)/scripts/torchx_pretrain.py:pretrain"      # of a checkout or an installed wheel
    torchx run -s local_cwd "$component" -j 1x4 -- --elastic --mock-data ...
    torchx run -s slurm "$component" -j 4x8 --gpu 8 --secret_file /shared/secret -- --elastic ...

Without deferred annotations: torchx evaluates the types of the arguments.

The launcher takes the place of torchrun in torchx's own ``dist.ddp``. Several nodes need a secret, in a file that every
node sees. Without ``--etcd`` the first node serves the store, and its loss ends the job at its last checkpoint.
"""

import shlex
from typing import Dict, List, Optional  # noqa: UP035 - torchx reads types from the source, and knows these names

import torchx.specs as specs
from torchx.components.structured_arg import StructuredNameArgument
from torchx.specs import macros

__all__ = ["pretrain"]


def pretrain(
    *script_args: str,
    script: str = "",
    image: str = "megatron-elastic",
    name: str = "/",
    j: str = "1x2",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    h: Optional[str] = None,  # noqa: UP045
    env: Optional[Dict[str, str]] = None,  # noqa: UP006, UP045
    secret_file: str = "",
    etcd: str = "",
    port: int = 29500,
    max_retries: int = 0,
    mounts: Optional[List[str]] = None,  # noqa: UP006, UP045
) -> specs.AppDef:
    """Elastic pretraining.

    Args:
        script_args: arguments of the script
        script: a pretraining script on the nodes; by default pretrain_gpt.py of the package that is installed there
        image: image of the nodes (docker/)
        name: {experiment}/{run}, as in dist.ddp
        j: {nodes}x{workers}, or {least}:{most}x{workers} where further nodes may join
        cpu: processors a node
        gpu: GPUs a node
        memMB: memory a node in MB
        h: a named resource, instead of cpu, gpu and memMB
        env: environment variables
        secret_file: a file with the job's secret, the same on all nodes; needed with several nodes
        etcd: HOST:PORT of etcd, several with commas; then any node may fail
        port: port of the first node's store
        max_retries: times the scheduler starts a failed node again
        mounts: mounts of the image, as in dist.ddp
    """
    nodes, _, workers = j.rpartition("x")
    if not nodes or not workers.isdecimal():
        raise ValueError(f"-j {j}: give NODESxWORKERS, such as 4x8")
    least, _, most = nodes.rpartition(":")
    count = int(most)
    if count > 1 and not secret_file:
        raise ValueError("several nodes need --secret_file: a file with the job's secret that every node sees")
    command = ["python", "-m", "megatron.elastic.launch", "--nnodes", nodes, "--nproc-per-node", workers]
    command += ["--rdzv-id", macros.app_id]
    text = shlex.join(command)
    if etcd:
        text += f" --rdzv-backend etcd --rdzv-endpoint {shlex.quote(etcd)}"
    elif count > 1:  # the first node's name is in a variable of the scheduler, which some leave empty on that node
        text += f" --rdzv-backend c10d --rdzv-endpoint $${{{macros.rank0_env}:=localhost}}:{port}"
    elastic = ["--elastic-secret-file", secret_file] if secret_file else []
    # torchx reads $$ as $.
    text += f" {shlex.quote(script)} " if script else ' "$$(python -m megatron.elastic.command files)/pretrain_gpt.py" '
    text += shlex.join([*script_args, *elastic])
    run = StructuredNameArgument.parse_from(name=name, script=script or "pretrain_gpt.py")
    role = specs.Role(
        name="node",
        image=image,
        min_replicas=int(least) if least else None,
        entrypoint="bash",
        args=["-c", text],
        env={"OMP_NUM_THREADS": "1", **(env or {})},
        num_replicas=count,
        max_retries=max_retries,
        retry_policy=specs.RetryPolicy.REPLICA,
        resource=specs.resource(cpu=cpu, gpu=gpu, memMB=memMB, h=h),
        port_map={"store": port},
        mounts=specs.parse_mounts(mounts) if mounts else [],
    )
    return specs.AppDef(name=run.run_name, roles=[role], metadata={"experiment": run.experiment_name})
