"""Redirects ``torch.cuda`` to the devices when it is imported."""

from tests.standin import redirect

redirect.install()
