"""The failure domain of this node: given, or else the machine that it runs on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron.elastic.config import ConfigError
from megatron.elastic.control import env
from megatron.elastic.state.domains import check_label

__all__ = ["domain_of"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def domain_of(given: str | None, environ: Mapping[str, str], boot_id: Path = _BOOT_ID) -> str:
    """``--elastic-domain``, else the environment's, else the boot id: all pods of one machine share it.

    Raises :class:`ConfigError` for a label that cannot name domains, and where there is neither.
    """
    for source, label in (("--elastic-domain", given), (env.DOMAIN, environ.get(env.DOMAIN))):
        if label:
            try:
                return check_label(label)
            except ValueError as error:
                raise ConfigError(f"{source} {error}") from None
    try:
        return check_label(boot_id.read_text(encoding="ascii").strip())
    except (OSError, ValueError):
        raise ConfigError(f"cannot read {boot_id}, which tells machines apart: give --elastic-domain") from None
