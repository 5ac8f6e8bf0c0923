"""Keywords of other libraries, and those that take their place here, for error messages. Pure.

They are those of neuronx-distributed's trainers, Orbax, Lightning, transformers, accelerate, Composer, DeepSpeed,
TorchTitan, torch DCP, Megatron and ignite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nxd_ckpt.core.suggestions import closest

_OTHER_NAMES = {
    "async_save": "async_checkpointing async_mode blocking enable_async_checkpointing save_async use_async",
    "every": "checkpoint_interval every_n_steps every_n_train_steps interval save_every save_freq save_interval "
    "save_interval_steps save_steps",
    "every_minutes": "interval_minutes save_interval_minutes train_time_interval",
    "fallback": "fall_back skip_corrupted",
    "final_save": "save_at_end save_final save_last save_on_exit",
    "ignore_keys": "exclude_keys load_exclude_keys load_ignore_keys save_ignore_keys skip_keys",
    "memory_cap": "memory_budget per_rank_memory_budget_bytes save_concurrent_gb staging_memory",
    "model": "module net",
    "num_kept_ckpts": "keep_checkpoints keep_last keep_last_k keep_last_n keep_latest_k max_checkpoints max_ckpts "
    "max_keep max_to_keep n_saved save_num_checkpoints_to_keep save_total_limit total_limit",
    "num_workers": "max_workers num_threads thread_count",
    "optimizer": "optim optimizers",
    "overwrite": "allow_overwrite exist_ok force save_overwrite",
    "path": "checkpoint_dir checkpoint_dir_str checkpoint_id ckpt_dir ckpt_path directory dirpath folder load_dir "
    "load_path output_dir root_dir save_dir save_folder",
    "preemption": "enable_preemption_checkpointing exit_signal exit_signal_handler save_on_preemption save_on_sigterm",
    "preemption_grace": "grace_period kill_wait",
    "retain": "best_fn best_mode keep_best keep_every keep_period keep_time_interval keep_top_k metric_for_best_model "
    "monitor preservation_policy save_best save_top_k",
    "scheduler": "lr_scheduler schedulers",
    "size_per_shard": "max_shard_size shard_size",
    "state": "app_state checkpointables items state_dict stateful",
    "storage_options": "client_kwargs fs_kwargs fs_options s3_options",
    "strict": "load_module_strict load_strict load_strict_model_weights partial_restore",
    "tag": "filename global_step save_filename step step_prefix",
    "timeout": "barrier_timeout timeout_secs timeout_seconds",
    "use_xser": "load_xser save_xser",
    "user_content": "client_state custom_metadata extra_state metadata",
    "verify": "check_integrity verify_integrity",
    "weights_only": "load_module_only model_only save_model_only save_only_model save_weights_only",
}
_OURS = {other: ours for ours, others in _OTHER_NAMES.items() for other in others.split()}
_EXAMPLES = {"retain": 'retain=[Last(3), Every(1000), Best("loss", 2)]'}


def meant(name: str, own: Collection[str], elsewhere: Mapping[str, Collection[str]]) -> str:
    """Return the name of an unknown keyword, with the keyword that was probably meant.

    ``own`` are the keywords that the function has; ``elsewhere`` those of related functions, by the functions' names.
    """
    ours = _OURS.get(name, name)
    if ours not in own and any(name in names for names in elsewhere.values()):
        ours = name
    places = [function for function, names in elsewhere.items() if ours in names]
    if ours not in own and not places:
        close = closest(name, {*own, *(one for names in elsewhere.values() for one in names)})
        if close is None:
            return repr(name)
        ours, places = close, [function for function, names in elsewhere.items() if close in names]
    if ours in own:
        return f"{name!r} (did you mean {_EXAMPLES.get(ours, repr(ours))}?)"
    return f"{name!r} (pass {_EXAMPLES.get(ours, ours + '=')} to {places[0]}())"
