"""Edits of the package that put wrong state into live objects, or lose it: each kind that was ever found, and siblings.

``python -m tests.load.proof_edits`` runs them all and prints what notices each.
"""

# ruff: noqa: E501 - a line for each edit, with the code as it is and as it becomes

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tests.load import proof_jobs
from tests.support.processes import FORKED

PROOF, NAMES, NOTHING = "ResumeDiffers", "the names of tag and live objects", "nothing"
_SECONDS = 300.0

_LIVE, _LOAD, _RESHARD, _SAVE = "nxd_ckpt/live/", "nxd_ckpt/loading/", "nxd_ckpt/reshard/", "nxd_ckpt/saving/"
_STATE, _MODEL, _PLAIN, _ZERO1 = (f"{_LIVE}{name}.py" for name in ("optimizer_state", "model", "plain", "zero1"))
_ATTEMPT, _OVER, _PLANNER, _PARTS, _TREES = (
    f"{_LOAD}{name}.py" for name in ("load_attempt", "overwriting", "load_planner", "parts", "trees")
)
_RESHARDING, _OPTIMIZER = (f"{_RESHARD}{name}.py" for name in ("resharding", "resharded_optimizer"))


class Edit(NamedTuple):
    """An edit of a file: what is there once, and what is put in its place; the job that shows it, and who notices.

    ``why`` says why nothing does.
    """

    what: str
    file: str
    old: str
    new: str
    job: str = "load plain"
    noticed: str = PROOF
    why: str = ""


def saving_job(job: str) -> str:
    """The job that saves what a load takes."""
    return job.replace("load", "save", 1).partition(",")[0]


def outcome(edit: Edit | None, job: str) -> tuple[str, str]:
    """Return the class and the text of the error of a load with the edit, or of one after a save with it, if any."""
    change = None if edit is None else (edit.file, edit.old, edit.new)
    is_of_save = edit is not None and edit.file.startswith(_SAVE)
    with tempfile.TemporaryDirectory(prefix="nxd_ckpt_proof_") as place, ExitStack() as ranks:
        world_size = 2 if "mesh" in job else 1
        given = change, is_of_save, saving_job(job), job, f"{place}/saved", world_size
        answers = [ranks.enter_context(_rank(*given, rank)) for rank in range(world_size)]
        found = [_answer(each) for each in answers]
    return max(found, key=lambda each: (each[0] == PROOF, each[0]))  # other ranks may only say that one failed


@contextmanager
def _rank(*given: Any) -> Iterator[Connection]:
    here, there = FORKED.Pipe()
    process = FORKED.Process(target=proof_jobs.run, args=(*given, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        process.kill()
        process.join()


def _answer(rank: Connection) -> tuple[str, str]:
    if not rank.poll(_SECONDS):
        return "TimeoutError", ""
    try:
        answer: tuple[str, str] = rank.recv()
        return answer
    except EOFError:
        return "EOFError", ""


_MOMENTS = '{"exp_avg": "exp_avg_sq", "exp_avg_sq": "exp_avg"}'

EDITS = [
    # The model.
    Edit("a tensor with gaps is not written", _MODEL, "        copy_in(self.live[name], value)\n\n    def ids", "        pass\n\n    def ids"),
    Edit("bytes go into a copy of the tensor", _MODEL, "memory_for(self.live[name])", "(lambda m: m if m is None else m.clone())(memory_for(self.live[name]))"),
    Edit("the first tensor is not filled", _OVER, "    for name in names:\n        leaf = tree[name]", "    for name in names[1:]:\n        leaf = tree[name]"),
    Edit("no tensor is filled", _ATTEMPT, "fill_model(model, self._trees.names, self", "fill_model(model, [], self"),
    Edit("buffers are left out", _PLANNER, "if takes_all or model.takes(name)]", "if takes_all or (model.takes(name) and 'running' not in name)]"),
    Edit("the first name is not assigned", _PLANNER, "trees.names = model.validate(trees.model_tree)", "trees.names = model.validate(trees.model_tree)[1:]"),
    Edit("a tied tensor is made two", _ATTEMPT, "            delivery.finish()\n            model.after_load(", "            delivery.finish()\n            import torch\n            torch.utils.swap_tensors(model._model[5].weight, torch.nn.Parameter(model._model[3].weight.detach().clone())) if type(model._model).__name__ == 'Sequential' and setattr(model._model[5], 'weight', torch.nn.Parameter(model._model[3].weight.detach().clone())) else None\n            model.after_load("),
    Edit("a module with a hook is not loaded", _OVER, "        model.load_own({name", "        (lambda *_: None)({name", "load hooks"),
    Edit("a tensor of one of several models is not written", f"{_LIVE}named_models.py", "        if adapter is not None:\n            adapter.assign(own, value)", "        if False:\n            adapter.assign(own, value)", "load by name"),
    Edit("a dict gets zeros", _MODEL, "            self.live[name] = value", "            self.live[name] = torch.zeros_like(value)", "load dicts"),
    Edit("tensors of one form are exchanged", _OVER, "        leaf = tree[name]\n", "        leaf = tree[{'3.weight': '4.weight', '4.weight': '3.weight'}.get(name, name)]\n"),
    Edit("tensors of a dict are exchanged", _OVER, "        leaf = tree[name]\n", "        leaf = tree[{'3.weight': '4.weight', '4.weight': '3.weight'}.get(name, name)]\n", "load dicts"),
    Edit("a tensor is planned twice", _PLANNER, "local_tree(trees.model_tree, trees.model_placed)", "{**trees.model_tree, '4.weight': trees.model_tree['3.weight']}"),
    Edit("tensors of a dict are planned under other names", _PLANNER, "local_tree(trees.model_tree, trees.model_placed)", "{**trees.model_tree, '4.weight': trees.model_tree['3.weight'], '3.weight': trees.model_tree['4.weight']}", "load dicts"),
    Edit("memory is filled beside the live one", _OVER, "        self._fill(leaf, memory)\n", "        self._fill(leaf, memory.clone())\n"),
    Edit("what is read at once is lost", _OVER, "        self._saw(leaf, out)\n        return out", "        self._saw(leaf, out)\n        return torch.zeros_like(out)", "load stepped"),
    Edit("a copy goes into a copy", f"{_LIVE}torch_xla.py", "copy_values(live.data, value)", "copy_values(live.data.clone(), value)"),
    # The optimizer.
    Edit("nothing is loaded into the optimizer", _ATTEMPT, "                if self._trees.optimizer_tree:\n                    optimizer.load", "                if False:\n                    optimizer.load"),
    Edit("the learning rate stays", _STATE, "            if option == OPTIMIZER_NAME:", '            if option in (OPTIMIZER_NAME, "lr"):'),
    Edit("the weight decay stays", _STATE, "            first[option] = _option(", '            first[option] = first[option] if option == "initial_lr" else _option('),
    Edit("options of the groups are exchanged", _STATE, "for number, options in enumerate(saved):\n        first", "for number, options in enumerate(reversed(saved)):\n        first"),
    Edit("options are not restored", _PLAIN, '        restore_groups([self._optimizer.param_groups], saved["param_groups"], read)', "        pass"),
    Edit("the state is not filled", _PLAIN, "            fill_state(self._optimizer.state, self._by_index(saved)", "            (lambda *_: None)(self._optimizer.state, self._by_index(saved)"),
    Edit("moments are exchanged", _STATE, "parameter.fill(entry, value)", f"parameter.fill({_MOMENTS}.get(entry, entry), value)"),
    Edit("the last entry is not filled", _STATE, "for entry, value in saved[index].items():\n            parameter", "for entry, value in list(saved[index].items())[:-1]:\n            parameter"),
    Edit("moments of the last parameter are lost", _STATE, "    for index, slot in slots.items():\n        live =", "    for index, slot in list(slots.items())[:-1]:\n        live ="),
    Edit("moments go into a copy", _STATE, "        read.into(leaf, memory)\n\n\ndef materialise", "        read.into(leaf, memory.clone())\n\n\ndef materialise", "load stepped"),
    Edit("new moments go into other memory", _STATE, "slot.as_placed(entry, _new(leaf, self.read, key))", "slot.as_placed(entry, torch.zeros_like(_new(leaf, self.read, key)))"),
    Edit("new moments are row-major", _STATE, "memory = allocated(shape, dtype, _stride(leaf, key))", "memory = allocated(shape, dtype)"),
    Edit("strides are those that were saved, without their order", _STATE, "        return stride_like(key, shape)\n    return fitted", "        return tuple(reversed(stride_like(key, shape)))\n    return fitted", noticed="EOFError|ResumeDiffers|ShapeMismatch"),
    Edit("the step starts at zero", _STATE, '            self._make(entry, value, self.slot.key.device if on_device else torch.device("cpu"))', "            self.entries[entry] = torch.zeros(())"),
    Edit("the live step stays", _STATE, "                overwrite(live, value, self.read)\n            else", "                pass\n            else", "load stepped"),
    Edit("state that the tag lacks stays", _STATE, "            _replace(state, slot.key, kept)\n            continue", "            continue", "load stepped"),
    Edit("an entry that the tag lacks stays", _STATE, "dict.fromkeys(saved[index]) | kept  #", "{**live, **dict.fromkeys(saved[index])}  #", "load stepped"),
    Edit("state of the whole optimizer stays", _STATE, '        del state[key]\n    for index', "        pass\n    for index", "load stepped"),
    Edit("a list of own state is cut", _STATE, "return map_tensors(tree, lambda leaf: _new", "return map_tensors(tree[:-1] if type(tree) is list else tree, lambda leaf: _new", "load own state"),
    Edit("a dict of own state is emptied", _STATE, "return map_tensors(tree, lambda leaf: _new", "return map_tensors([*tree[:-1], {}] if type(tree) is list else tree, lambda leaf: _new", "load own state"),
    Edit("own state becomes numbers", _STATE, "return map_tensors(tree, lambda leaf: _new", "return map_tensors(int(tree) if tree is True else tree, lambda leaf: _new", "load own state"),
    Edit("one of several optimizers is loaded", f"{_LIVE}optimizer.py", "self._adapters[name].load(part.tree, read, _keeps_of(name, keeps))", "self._adapters[name].load(part.tree, read, _keeps_of(name, keeps)) if name == 'first' else None", "load by name"),
    Edit("a dict of state is emptied", f"{_LIVE}optimizer_dict.py", "        self._state.update(loaded)", '        self._state.update({**loaded, "state": {}})', "load dicts"),
    Edit("another order of parameters is not seen", f"{_LOAD}load_context.py", "        return len(saved) == len(live) and any(", "        return False and any(", "load reversed"),
    Edit("the plan has no state", _PLANNER, "                return tree\n        form = optimizer.form()", '                return {**tree, "state": {}, **({"base_state": {}} if "base_state" in tree else {})}\n        form = optimizer.form()'),
    Edit("what is left out goes too far", _PLANNER, "        return without(tree, self._names_by_index(optimizer), self._filter.ignores, self._filter.covers)", '        return without(tree, self._names_by_index(optimizer), lambda name: name.endswith("exp_avg") or self._filter.ignores(name), self._filter.covers)', "load filtered"),
    Edit("weights that are left out are loaded", _PLANNER, "            loaded = [name for name in chosen(source.stages) if", "            loaded = [name for name in source.stages if", "load filtered", NOTHING, "a filter says what a load means; the proof asks the same filter only for what was not loaded"),
    # Scheduler and content.
    Edit("the scheduler is not loaded", _PARTS, "        live.load_state_dict(saved)", "        pass"),
    Edit("schedulers are exchanged", _PARTS, "for scheduler, state in zip(live, saved, strict=True):\n            load_scheduler(scheduler, state)", "for scheduler, state in zip(live, saved, strict=True):\n            load_scheduler(live[0], state)", "load lists"),
    Edit("a dict for the scheduler stays empty", _PARTS, "        live.update(saved or {})", "        pass", "load dicts"),
    Edit("the rank's content is not filled", _ATTEMPT, "            live.update(content)", "            pass", "load content"),
    # ZeRO-1, on the sizes of the save and on others.
    Edit("master weights stay", _ZERO1, "            overwrite(self.slots[index].key, weights, read)", "            pass", "load ranks, same"),
    Edit("master weights that are not shown stay", _ZERO1, "            overwrite(self.slots[index].key, weights, read)", "            pass", "load ranks, same, no masters"),
    Edit("state of the shards is not filled", _ZERO1, '        fill_state(base.state, dict(enumerate(self.slots)), saved["base_state"], read, keeps)', "        pass", "load ranks, same"),
    Edit("master weights of two parameters are exchanged", _ZERO1, "            overwrite(self.slots[index].key, weights, read)", "            overwrite(self.slots[index].key, masters.get({1: 4, 4: 1}.get(index), weights), read)", "load ranks, same"),
    Edit("another rank's shards are loaded", _PLANNER, "self._opened.optimizer_tree(self._topology.coordinates, context.live_names)", "self._opened.optimizer_tree(type(self._topology.coordinates)(), context.live_names)", "load ranks, same"),
    Edit("another rank's weights are loaded", f"{_RESHARD}resharded_model.py", "        return self._tree(self._context.near(pp_rank))", "        return self._tree(Coordinates(pp_rank))", "load ranks, same"),
    Edit("rows are cut off", _RESHARDING, "    return plan_reads(targets, list(sources), name)", "    return plan_reads(targets, list(sources), name)[:-1]", "load ranks, more tp"),
    Edit("rows of moments are cut off", _RESHARDING, "    return plan_reads(targets, list(sources), name)", "    reads = plan_reads(targets, list(sources), name)\n    return reads[:-1] if name.startswith('optim/') else reads", "load ranks, more dp"),
    Edit("all shards are the first", _RESHARDING, "zero1_pieces(pieces, local_shape, shards, shard)", "zero1_pieces(pieces, local_shape, shards, 0)", "load ranks, more dp"),
    Edit("the first tensor-parallel rank's is read", _RESHARDING, "same = CutIndex(at.tp_rank,", "same = CutIndex(0,", "load ranks, stages"),
    Edit("the first shard is read for all", _RESHARDING, "holder=replace(same, shard=read.holder.shard)", "holder=replace(same, shard=0)", "load ranks, stages"),
    Edit("the live cut is taken for that of another rank", _RESHARDING, "pieces = live.partition.pieces(live.shape, at.tp_rank, live_cut.tp, ep_rank)", "pieces = live.partition.pieces(live.shape, live_cut.tp - 1 - at.tp_rank, live_cut.tp, ep_rank)", "load ranks, more tp"),
    Edit("targets are taken for sources", _RESHARDING, "    return plan_reads(targets, list(sources), name)", "    return [replace(read, source=replace(read.source, offset=read.target.offset)) if read.source.offset != read.target.offset else read for read in plan_reads(targets, list(sources), name)]", "load ranks, more dp", f"{PROOF}|ValueError|InvalidArgument|CorruptCheckpoint|MalformedFile"),
    Edit("moments are exchanged on other sizes", _OPTIMIZER, "            state = {key: self._entry(slot, saved, key) for key in keys}", f"            state = {{key: self._entry(slot, saved, {_MOMENTS}.get(key, key)) for key in keys}}", "load ranks, more dp"),
    Edit("master weights are lost on other sizes", _OPTIMIZER, "                masters[index] = state.pop(MASTER_WEIGHTS)", "                state.pop(MASTER_WEIGHTS)", "load ranks, more dp"),
    Edit("an entry is lost on other sizes", _OPTIMIZER, "            if state:\n                entries[index] = state", '            state.pop("exp_avg_sq", None)\n            if state:\n                entries[index] = state', "load ranks, more dp", f"{PROOF}|OptimizerMismatch"),
    Edit("a parameter's state is lost on other sizes", _OPTIMIZER, "            if state:\n                entries[index] = state", "            if state and index:\n                entries[index] = state", "load ranks, more dp"),
    Edit("the step is another's on other sizes", _OPTIMIZER, "        if key == STEP:\n            return reference", "        if key == STEP:\n            return 1.0", "load ranks, more dp", NOTHING, "a plan that makes up a number says what the load means; tensors alone have names in the index"),
    Edit("options are those of the live group", _OPTIMIZER, 'groups.append({**options, "params"', 'groups.append({**options, "lr": 0.5, "params"', "load ranks, more dp", NOTHING, "as the line before: values of groups are not in the index"),
    # DTensors: FSDP2 on two ranks, and loaded into columns.
    Edit("each rank loads the first one's part", _TREES, "part_of(leaf, placed.pieces, placed.local_shape)", "part_of(leaf, placed.layout.pieces(placed.shape, (0,)), placed.local_shape)", "load mesh", f"{PROOF}|ShapeMismatch"),
    Edit("ranks exchange their parts", _TREES, "part_of(leaf, placed.pieces, placed.local_shape)", "part_of(leaf, placed.layout.pieces(placed.shape, (1 - placed.coordinate[0],) if placed.shape[:1] != (9,) else placed.coordinate), placed.local_shape)", "load mesh"),
    Edit("a shard is filled in a copy", f"{_LIVE}parameters.py", "    local = dtensor.local_of(live)\n    if not local.is_contiguous() or local.is_neg()", "    local = dtensor.local_of(live).clone()\n    if not local.is_contiguous() or local.is_neg()", "load mesh"),
    Edit("moments of shards go into a copy", _STATE, "slot.as_placed(entry, _new(leaf, self.read, key))", "slot.as_placed(entry, _new(leaf, self.read, key).clone())", "load mesh"),
    Edit("moments of shards are plain tensors", _STATE, "return like(tensor, self.models.get(path, self.key)) if path in self.placed else tensor", "return tensor", "load mesh"),
    Edit("moments of shards are exchanged", _STATE, "parameter.fill(entry, value)", f"parameter.fill({_MOMENTS}.get(entry, entry), value)", "load mesh"),
    Edit("a shard loses what another rank saved of it", _TREES, "    return Assembly(leaf.dtype, shape, tuple(fragments))", "    return Assembly(leaf.dtype, shape, tuple(fragments[:-1]))", "load mesh, columns"),
    Edit("parts of a shard are in the wrong place", _TREES, "        fragments += (fragment.moved(piece.local.offset) for fragment in inside)", "        fragments += (fragment.moved(piece.local.offset) for fragment in inside)\n    if len({fragment.target.size for fragment in fragments}) == 1:\n        targets = [fragment.target for fragment in fragments][::-1]\n        fragments = [Fragment(fragment.stub, fragment.source, target) for fragment, target in zip(fragments, targets, strict=True)]", "load mesh, columns"),
    # Hugging Face directories.
    Edit("the first tensor of a directory is not filled", _ATTEMPT, "fill_model(model, self._trees.names, self", "fill_model(model, self._trees.names[1:], self", "load hugging face"),
    Edit("a directory's tensors go into copies", _MODEL, "memory_for(self.live[name])", "(lambda m: m if m is None else m.clone())(memory_for(self.live[name]))", "load hugging face"),
    Edit("shards do not follow a directory's weights", _ATTEMPT, "                    optimizer.follow(self._trees.keeps)", "                    pass", "load hugging face"),
    # Precision.
    Edit("weights are rounded though the tag has exact ones", _PLANNER, "            return master\n        is_wider", "            return Assembly.of(leaf).cast(spec.dtype)\n        is_wider", "load rounded"),
    Edit("master weights are those that were rounded", _PLANNER, "return {**tree, MASTERS: {**shards, **tree.get(MASTERS, {})}} if shards else tree", "return tree", "load exact"),
    Edit("exact weights lose rows", _PLANNER, "    return part_of(leaf, pieces, zero1_shape(leaf.shape, slot.shards))", "    return part_of(leaf, [], zero1_shape(leaf.shape, slot.shards))", "load exact"),
    # Saves: what they lose.
    Edit("a save leaves buffers out", f"{_SAVE}capture.py", "    captured = _without_ignored(captured, options, model_adapter, topology)", '    captured = replace(captured, model=replace(captured.model, tree={name: value for name, value in captured.model.tree.items() if "running" not in name}))\n    captured = _without_ignored(captured, options, model_adapter, topology)', noticed=f"{PROOF}|KeyMismatch|KeyError"),
    Edit("a save leaves the scheduler out", f"{_SAVE}capture.py", '"scheduler": _scheduler_state(scheduler),', '"scheduler": None,', noticed="PartNotFound"),
]  # fmt: skip


def noticed(edit: Edit) -> str:
    """Return who notices the edit: the class of the error, or `NOTHING`."""
    return outcome(edit, edit.job)[0] or NOTHING


if __name__ == "__main__":
    for number in list(map(int, sys.argv[1:])) or range(len(EDITS)):
        one = EDITS[number]
        kind, text = outcome(one, one.job)
        mark = "" if (kind or NOTHING) in one.noticed.split("|") else "  <-- expected " + one.noticed
        print(f"{number:3} {kind or NOTHING:20} {one.what}{mark}\n      {text[:260]}", flush=True)
