"""Calls that no test makes: mypy, in ``make lint``, accepts the right ones and finds misspelt keywords and wrong types.

So it does in a script of a user. An error that it does not find is one more "unused type: ignore".
"""

from concurrent.futures import Future

from nxd_ckpt import Checkpointer, Partition, Topology, convert, load_checkpoint, open_checkpoint, save_checkpoint


def right() -> None:
    pending: Future[None] = save_checkpoint("run", 4, {"w": 1}, async_save=True)
    pending.add_done_callback(lambda pending: print(pending.exception()))
    save_checkpoint("run", 3, {"w": 1}, num_kept_ckpts=2, overwrite=True, durable=False, topology=Topology(dp=2))
    load_checkpoint("run", verify="reading", key_mapping={"a": "b"}, ignore_keys=["optim/*"], timeout=60.0)
    with Checkpointer("run", memory_cap="4GB", timeout="10m") as checkpointer:
        checkpointer.save("t", {"w": 1}, use_xser=True, partitions={"w": Partition(partition_dim=0)})
        checkpointer.load("t", strict=False, trust_pickle=True)
    open_checkpoint("run", storage_options={"anon": True}).keys("model/*")
    convert("run/3", "run/4", to="tag", tp=4, num_workers=2, partitions={"w": Partition(partition_dim=0)}, dry_run=True)
    convert("run/3", "hf", to="hf", config="config.json", dtype="bfloat16", size_per_shard="1GB", progress=True)


def wrong() -> None:
    _: int = save_checkpoint("run", 4, {"w": 1}).tag  # type: ignore[assignment]
    save_checkpoint("run", 3, overwite=True)  # type: ignore[call-arg]
    save_checkpoint("run", 3, durable="no")  # type: ignore[arg-type]
    load_checkpoint("run", verfy=True)  # type: ignore[call-arg]
    load_checkpoint("run", verify="later")  # type: ignore[arg-type]
    Checkpointer("run", memory_cap=[1])  # type: ignore[arg-type]
    Checkpointer("run").save("t", use_xsr=True)  # type: ignore[call-arg]
    Checkpointer("run").load("t", prefix=3)  # type: ignore[arg-type]
    open_checkpoint("run", trust=True)  # type: ignore[call-arg]
    convert("run/3", "run/4", to="tag", tp="4")  # type: ignore[arg-type]
    convert("run/3", "hf", to="hf", max_shard_size="1GB")  # type: ignore[call-arg]
