# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What to run after almost anything. A part of it would start a server with kernels that nobody has checked."""

from __future__ import annotations

# It opens, builds, proves, configures and restarts; each of them only where that is due.
FULL_RUN = "ansible-playbook blackwell.inference.site -l HOST"
