"""Without a cluster, on any CPU host: a tag's optimizer, or all of it, for other sizes; a tag in another place, or as
one archive; its model as a Hugging Face directory, or a tag from one; all of it as plain files; and both from and to
torch DCP."""

from nxd_ckpt.convert.cp import Copy, copy_checkpoint
from nxd_ckpt.convert.export import Export, export_checkpoint
from nxd_ckpt.convert.from_dcp import from_dcp
from nxd_ckpt.convert.import_plan import Import
from nxd_ckpt.convert.importing import import_checkpoint
from nxd_ckpt.convert.job import Converted
from nxd_ckpt.convert.migrate import Migration, migrate
from nxd_ckpt.convert.pack import Packed, pack_checkpoint
from nxd_ckpt.convert.resharding import reshard
from nxd_ckpt.convert.to_dcp import to_dcp
from nxd_ckpt.convert.unshard import Unsharded, unshard_checkpoint
from nxd_ckpt.convert.unsharded import UnshardStrategy
from nxd_ckpt.convert.zero1 import convert_zero1

__all__ = [
    "Converted",
    "Copy",
    "Export",
    "Import",
    "Migration",
    "Packed",
    "UnshardStrategy",
    "Unsharded",
    "convert_zero1",
    "copy_checkpoint",
    "export_checkpoint",
    "from_dcp",
    "import_checkpoint",
    "migrate",
    "pack_checkpoint",
    "reshard",
    "to_dcp",
    "unshard_checkpoint",
]
