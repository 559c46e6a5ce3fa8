"""Differences between CPU, CUDA and Ascend behind one small interface.

Only this folder imports a vendor package or redirects one. :func:`select.select`
finds the platform; everything else is handed a :class:`base.Platform`.
"""
