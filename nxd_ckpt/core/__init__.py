"""The pure core: geometry, topology, manifests and policies. No torch, no files, no clock."""
