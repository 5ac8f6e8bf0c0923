"""The benchmark: nxd_ckpt beside what the hardware allows and beside other ways to save and load the same state.

``python -m tools.bench`` (or ``make bench``) runs :data:`tools.bench.scenarios.SCENARIOS`: each in processes of its own
(:mod:`~tools.bench.launch`, :mod:`~tools.bench.worker`), every contestant taking its turn in every round
(:mod:`~tools.bench.rounds`). What comes back are seconds per round (:mod:`~tools.bench.results`); from them come
ratios and targets (:mod:`~tools.bench.targets`), tables (:mod:`~tools.bench.report`) and a picture
(:mod:`~tools.bench.picture`), all of which also run without torch.
"""
