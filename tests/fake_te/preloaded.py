"""What ranks with Transformer Engine are forked from: `tests.helpers.preloaded`, with it on the path."""

from __future__ import annotations

from tests.fake_te.install import install, use_settings_of_cuda

install()
use_settings_of_cuda()

import tests.helpers.preloaded  # noqa: E402, F401
from mega_rl.engines import build  # noqa: E402
from mega_rl.engines.models.specs import choose_transformer_impl  # noqa: E402

# The one place that would not choose these layers on a CPU.
build.choose_transformer_impl = lambda requested, **_: choose_transformer_impl(requested, device_type="cuda")
