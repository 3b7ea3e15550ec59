# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Managed by blackwell.inference: python -m sglang.launch_server, for a server with secrets.

sglang logs all of its options when it starts, API keys included; here their values are starred out.
"""

from __future__ import annotations

import logging
import re
import runpy

SECRET = re.compile(r"""((?:api_key|password|watermark_\w+)['"]?[=:]\s*)('[^']*'|"[^"]*")""")


def hide_secrets(record: logging.LogRecord) -> bool:
    """Star out the values of secrets in a log record, and let it pass."""
    record.msg, record.args = SECRET.sub(r"\1'********'", record.getMessage()), None
    return True


if __name__ == "__main__":
    logging.getLogger("sglang.srt.entrypoints.engine").addFilter(hide_secrets)
    # As -m does, so that the ranks that are spawned import the same main module.
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
