# Copyright (c) blackwell.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Print a recorded result with one check out of another, in which one number was one ulp off: it was recorded at fewer sizes.

python one_wrong_check.py RESULT BROKEN
"""

import json
import sys
from pathlib import Path

result, broken = (json.loads(Path(name).read_text()) for name in sys.argv[1:])
right, wrong = (probe["stages"]["fusion"]["checks"]["fusion"] for probe in (result, broken))
right[0] = next(check for check in wrong if check["tokens"] == right[0]["tokens"])
print(json.dumps(result))
