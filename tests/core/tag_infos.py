"""Random listings of tags."""

from hypothesis import strategies as st

from nxd_ckpt.core.tags import TagInfo

NAMES = st.text("abc_0123456789", min_size=1, max_size=8)

TAGS = st.lists(
    st.builds(TagInfo, NAMES, st.floats(0, 4e9), st.booleans(), st.booleans()), unique_by=lambda info: info.tag
)
