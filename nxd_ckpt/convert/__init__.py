"""Without a cluster, on any CPU host: a tag's optimizer, or all of it, for other sizes; a tag in another place;
its model as a Hugging Face directory; or a tag from such a directory; model and optimizer as plain files."""

from nxd_ckpt.convert.cp import Copy, copy_checkpoint
from nxd_ckpt.convert.export import Export, export_checkpoint
from nxd_ckpt.convert.import_plan import Import
from nxd_ckpt.convert.importing import import_checkpoint
from nxd_ckpt.convert.resharding import reshard
from nxd_ckpt.convert.unshard import Unsharded, unshard_checkpoint
from nxd_ckpt.convert.unsharded import UnshardStrategy
from nxd_ckpt.convert.zero1 import convert_zero1

__all__ = [
    "Copy",
    "Export",
    "Import",
    "UnshardStrategy",
    "Unsharded",
    "convert_zero1",
    "copy_checkpoint",
    "export_checkpoint",
    "import_checkpoint",
    "reshard",
    "unshard_checkpoint",
]
