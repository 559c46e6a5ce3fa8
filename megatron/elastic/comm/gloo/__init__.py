"""The baseline (``--elastic-comm gloo``): every group is rebuilt over gloo at every edit."""
