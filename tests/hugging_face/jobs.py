"""Random models and the jobs that train them."""

from hypothesis import strategies as st

from nxd_ckpt.core.heads import HARDWARE
from tests.hugging_face.reference import Job, Model


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any family, number of heads, way to keep q, k and v, number of copies, and sizes."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "mixtral", "gpt_neox"]))
    tp = draw(st.sampled_from([1, 2, 3, 4]))
    ep = draw(st.sampled_from([1, 2])) if family == "mixtral" else 1
    copies, kv_heads = 1, tp * draw(st.integers(1, 2))
    qkv = "separate"
    if family != "gpt_neox":
        qkv = draw(st.sampled_from(["separate", "linear", "fused", "coalesced"]))
        if qkv in ("linear", "fused"):
            # Fewer key-value heads than ranks, or more places than ranks: a multiple of the ranks all together.
            copies = draw(st.sampled_from([1, 2, 3]))
            kv_heads = draw(st.sampled_from([n for n in range(1, 7) if n * copies % tp == 0]))
    groups = 1 if qkv == "coalesced" or family == "gpt_neox" else draw(st.integers(1, 2)) * copies
    vocab = tp * draw(st.integers(1, 3))
    pp = draw(st.sampled_from([1, 2]))
    model = Model(
        family,
        layers=draw(st.integers(pp, 2)),
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 2)),
        intermediate=tp * draw(st.integers(1, 2)),
        vocab=vocab - draw(st.integers(0, max(min(tp, vocab - 1) - 1, 0))),  # more rows than one rank has
        experts=ep * draw(st.integers(1, 2)),
        bias=family == "qwen2" or (family in ("llama", "qwen3") and draw(st.booleans())),
        mlp_bias=family == "llama" and draw(st.booleans()),
    )
    hardware = draw(st.sampled_from(HARDWARE))
    return Job(model, tp, pp, ep, qkv, draw(st.booleans()), copies, hardware, padded_vocab=vocab)
