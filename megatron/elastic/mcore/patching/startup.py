"""The patches at start: argument functions on every platform, and a few more without a GPU.

These are the rows of ``group="platform"``. With ``--elastic`` the rows of
:mod:`training_loop` follow as soon as arguments are parsed: before Megatron initialises,
and after every module that binds a name by value is loaded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import os
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from megatron.elastic.config import ElasticConfig
from megatron.elastic.control import env
from megatron.elastic.engine.inject import parse as parse_faults
from megatron.elastic.mcore.args import arguments, combinations, folders, preflight, substitutions, support
from megatron.elastic.mcore.args.bad_input import Faults, port_in_use_named, translated
from megatron.elastic.mcore.args.moments import take_over_moments
from megatron.elastic.mcore.args.muon import snapshot_line
from megatron.elastic.mcore.args.overlap import take_over_overlap
from megatron.elastic.mcore.args.tokenizer import load_tokenizer, tokenizer_named
from megatron.elastic.mcore.checkpoint import save_queue
from megatron.elastic.mcore.model import bert_layers, latent_attention, norms, packed_sequences, torch_adam
from megatron.elastic.mcore.patching.patches import Patch, PatchSet, apply, bound, describe
from megatron.elastic.mcore.patching.releases import between_releases, check_megatron, installed_version
from megatron.elastic.platform.base import Platform

__all__ = ["Startup"]


@dataclass
class Startup:
    """The patches of one process, applied as soon as ``megatron.training`` is loaded."""

    platform: Platform
    in_force: PatchSet = field(default_factory=PatchSet)
    checked: bool = False
    """The release of megatron.core was checked before its import."""
    _elastic_rows: tuple[Patch, ...] = ()
    _faults: Faults = field(default_factory=Faults)
    """Bad input found up to the end of validation, which reports all of it."""
    _warned: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Apply the platform's rows. Idempotent. Raises :class:`BadInput` for a release outside the tested range."""
        if not self.checked:  # the script imported it before the adaptor
            check_megatron(importlib.import_module("megatron.core"))
        apply(self.rows(), into=self.in_force)

    def rows(self) -> Sequence[Patch]:
        """The platform's rows, in the order they are applied."""
        name = self.platform.name
        rows = self._argument_rows + (self._layer_rows if name != "cuda" else ())
        return rows + (self._cpu_rows if name == "cpu" else ())

    @functools.cached_property
    def _argument_rows(self) -> tuple[Patch, ...]:
        return (
            Patch(
                "megatron.training.arguments.parse_args",
                "adds the --elastic flags to Megatron's parser; a bad flag is one line, not a page of usage",
                self._make_parse,
                group="platform",
            ),
            Patch(
                "megatron.training.argument_utils.ArgumentGroupFactory._get_field_docstrings",
                "parses Megatron's sources for the help text of every flag, at each of two parses: only for --help",
                _make_help_texts,
                group="platform",
            ),
            Patch(
                "megatron.training.arguments.validate_args",
                "support matrix, substitutions and data checks before Megatron's own checks",
                self._make_validate,
                group="platform",
            ),
            Patch(
                "megatron.core.tokenizers.utils.build_tokenizer.build_tokenizer",
                "a tokenizer that cannot be loaded is one line that names the flag, not a traceback",
                _make_tokenizer,
                group="platform",
            ),
            Patch(
                "megatron.training.initialize.initialize_megatron",
                "parses arguments first, so that --elastic can replace it; without a GPU passes allow_no_cuda",
                self._make_initialize,
                group="platform",
            ),
            Patch(
                "megatron.core.datasets.utils.compile_helpers",
                "runs make where the package has no makefile: skipped when the compiled helper is there, and else for "
                "this interpreter",
                _make_compile_helpers,
                group="platform",
            ),
        )

    @functools.cached_property
    def _layer_rows(self) -> tuple[Patch, ...]:
        return (
            Patch(
                "megatron.core.transformer.torch_norm.WrappedTorchNorm.__new__",
                "torch's norms under sequence parallelism and with --apply-layernorm-1p (no Apex without CUDA)",
                norms.make_wrapped_norm,
                group="platform",
            ),
            Patch(
                "megatron.core.transformer.dot_product_attention.DotProductAttention.__init__",
                "keys and values of two widths, as multi-latent attention has them, on the local attention",
                latent_attention.make_two_widths,
                group="platform",
            ),
            Patch(
                "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
                "packed sequences (--sft) on the local attention",
                packed_sequences.make_packed,
                group="platform",
            ),
            Patch(
                "megatron.core.models.bert.bert_layer_specs.get_bert_layer_with_transformer_engine_spec",
                "pretrain_bert.py imports these layers whatever its flags are: Megatron's own where they are missing",
                bert_layers.make_layer_spec,
                group="platform",
            ),
        )

    @functools.cached_property
    def _cpu_rows(self) -> tuple[Patch, ...]:
        config_reason = (
            "deallocate_pipeline_outputs off: gloo's asynchronous send still reads what Megatron frees after posting it"
        )
        return (
            Patch(
                "megatron.training.arguments.core_transformer_config_from_args",
                config_reason,
                _make_config,
                group="platform",
            ),
            Patch(
                "megatron.core.transformer.moe.moe_utils.maybe_move_tensor_to_cpu",
                "turns split sizes into a list only when they lie on a GPU; all-to-all wants the list everywhere",
                _make_split_sizes,
                group="platform",
            ),
            Patch(
                "megatron.core.dist_checkpointing.strategies.filesystem_async.get_write_results_queue",
                "starts a process that imports everything anew at the first save, and outlives a killed rank",
                save_queue.make_results_queue,
                group="platform",
            ),
            Patch(
                "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
                "torch's Adam has no step count before its first step: loading a checkpoint asserts on it",
                torch_adam.make_state_dict,
                group="platform",
            ),
            Patch(
                "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
                "torch's Adam counts steps per parameter: loading makes all share one tensor, counted many times",
                torch_adam.make_load_state_dict,
                group="platform",
            ),
            Patch(
                "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
                "torch's Adam counts steps per parameter: reshardable checkpoints carry the count once",
                torch_adam.make_set_states,
                group="platform",
            ),
        )

    # ------------------------------------------------------------ replacements

    def _warn_once(self, warning: str) -> None:
        """Print a warning found while arguments are parsed, which happens more than once (ft_integration)."""
        if warning not in self._warned and os.environ.get("RANK", "0") == "0":
            print(f"warning: {warning}", flush=True)
        self._warned.add(warning)

    def _make_parse(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parse_args(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            call["extra_args_provider"] = arguments.chained(call["extra_args_provider"], self._faults, self._warn_once)
            parsed = original(**call)
            if not hasattr(parsed, "elastic"):
                parsed.elastic = False  # a YAML configuration without this setting
            self._parsed(parsed)
            return parsed

        return parse_args

    def _make_validate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate_args(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            parsed, faults = call["args"], self._faults
            result, config = parsed, ElasticConfig()
            with faults.collecting():
                take_over_overlap(parsed)
                config = arguments.config_from_args(parsed)
            self._check_flags(parsed, config)
            if not faults:  # else most faults that Megatron finds are consequences
                with (
                    faults.collecting(),
                    translated(),
                    preflight.launch_environment(self.platform.name, parsed),
                    redirect_stdout(io.StringIO()) if config.check else nullcontext(),  # it prints every argument
                ):
                    result = original(**call)
            validated = not faults
            with faults.collecting():
                parse_faults(config.inject, int(os.environ.get(env.SLOTS, parsed.world_size)))
            for check in (preflight.check_data, preflight.check_shared_memory):
                with faults.collecting():
                    check(parsed)
            with faults.collecting():
                folders.check_folders(parsed)
            if config.check and validated:  # in a start Megatron loads it next, and the script reads the data
                with faults.collecting():
                    load_tokenizer(parsed)
                    if not faults:
                        preflight.check_tokens(parsed, parsed.padded_vocab_size)
            faults.raise_if_any()
            if config.check:
                passed = "--elastic-check: nothing is refused, the job would start; nothing was trained or written"
                _say("" if os.environ.get(env.REFUSED) == "1" else passed, parsed)  # else the launcher prints why
                raise SystemExit(0)
            return result

        return validate_args

    def _check_flags(self, args: Namespace, config: ElasticConfig) -> None:
        """Check the flags alone: collect refusals, print warnings and both tables."""
        with self._faults.collecting():
            if args.elastic:
                support.check_launcher(os.environ, sys.argv)
        with self._faults.collecting():
            warnings = [*support.check(args, config, self.platform.name), between_releases(installed_version())]
            for warning in filter(None, (*warnings, *combinations.pickled_scales(args, os.environ))):
                _say(f"warning: {warning}", args)
        self._substitute(args, config.strict_flags)
        if args.elastic:
            take_over_moments(args)
            _say(snapshot_line(args, config), args)
        with self._faults.collecting():
            preflight.check_sources(args)
        with self._faults.collecting():
            preflight.check_sizes(args)
            for warning in support.thin_copies(args, config) if args.elastic else ():
                _say(f"warning: {warning}", args)

    def _substitute(self, args: Namespace, strict: bool) -> None:
        """Replace unsupported flags, and print both tables."""
        name = self.platform.name
        machine = substitutions.Installed.detect(name)
        changed = substitutions.substitute(args, machine)
        if strict:
            with self._faults.collecting():
                substitutions.refuse(changed)
        _say(substitutions.table(changed, f"Megatron flags substituted on {name}"), args)
        if args.elastic:
            unused = substitutions.substitute(args, machine, substitutions.ELASTIC_ROWS)
            _say(substitutions.table(unused, "Megatron flags without effect under --elastic"), args)

    def _make_initialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
            call = bound(original, args, kwargs)
            call["allow_no_cuda"] = call["allow_no_cuda"] or self.platform.name == "cpu"
            if call.get("parsed_args", self) is not None:
                with port_in_use_named():
                    return original(**call)
            home = sys.modules["megatron.training.initialize"]
            ignore_unknown = bool(call.get("ignore_unknown_args"))
            call["parsed_args"] = home.parse_args(call.get("extra_args_provider"), ignore_unknown)
            # Parsing may have put --elastic's replacement in place: it is the one to run.
            present = home.initialize_megatron
            with port_in_use_named():
                return original(**call) if present is initialize_megatron else present(**call)

        return initialize_megatron

    def _parsed(self, args: Namespace) -> None:
        """Apply ``--elastic``'s rows once arguments are parsed; print the table if requested."""
        rows = list(self.rows())
        config = ElasticConfig()
        with self._faults.collecting():
            take_over_overlap(args)
            config = arguments.config_from_args(args)
        if getattr(args, "use_checkpoint_args", False):  # Megatron reads the checkpoint before it validates
            with self._faults.collecting():
                folders.check_folders(args)
            self._faults.raise_if_any()
        if getattr(args, "yaml_cfg", None) is not None:  # Megatron validates such settings elsewhere
            if args.elastic:
                self._faults.add(f"--yaml-cfg {args.yaml_cfg}: elastic: give --elastic on the command line")
            self._faults.raise_if_any()
        if args.elastic and not self._faults:  # else the run ends at validation
            if not self._elastic_rows:  # Megatron parses more than once (ft_integration)
                host = importlib.import_module("megatron.elastic.mcore.loop.training_loop")
                self._elastic_rows = tuple(host.patches(args, config))
            apply(self._elastic_rows, into=self.in_force)
            rows += self._elastic_rows
        if config.print_patches:
            _say(describe(rows), args)


def _say(text: str, args: Namespace) -> None:
    if text and args.rank == 0:
        print(text, flush=True)


def _make_help_texts(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_field_docstrings(*args: Any, **kwargs: Any) -> Any:
        asked = any(word in ("-h", "--help") for word in sys.argv[1:])
        return original(*args, **kwargs) if asked else {}

    return _get_field_docstrings


def _make_tokenizer(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def build_tokenizer(*args: Any, **kwargs: Any) -> Any:
        with tokenizer_named(bound(original, args, kwargs)["args"]):
            return original(*args, **kwargs)

    return build_tokenizer


def _make_compile_helpers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            with _making_for_this_python():
                original()

    return compile_helpers


@contextmanager
def _making_for_this_python() -> Iterator[None]:
    """Have Megatron's makefile, which asks ``python3``, build for this interpreter also where none is activated."""
    path, flags = os.environ.get("PATH"), os.environ.get("MAKEFLAGS")
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{path or os.defpath}"
    os.environ["MAKEFLAGS"] = f"{flags or ''} LIBEXT={sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        yield
    finally:
        for name, before in (("PATH", path), ("MAKEFLAGS", flags)):
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _make_config(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def core_transformer_config_from_args(*args: Any, **kwargs: Any) -> Any:
        with translated(ValueError, NotImplementedError):
            config = original(*args, **kwargs)
        config.deallocate_pipeline_outputs = False
        config.batch_p2p_sync = False
        return config

    return core_transformer_config_from_args


def _make_split_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(*args: Any, **kwargs: Any) -> Any:
        call = bound(original, args, kwargs)
        moved = original(**call)
        return moved.numpy() if call.get("as_numpy") and hasattr(moved, "numpy") else moved

    return maybe_move_tensor_to_cpu
