"""Every problem of a run that can be known before it costs anything: configuration, files, disk, nodes, network.

Each check returns its problems, so that the user mends them in one go and not one a queue time. `inspect` is what one
process can see, on a login node too; `agree` puts together what all ranks of a job saw.
"""

from recipe.preflight.local import Found, Report, code_version, inspect, versions
from recipe.preflight.nodes import agree, same_run

__all__ = ["Found", "Report", "agree", "code_version", "inspect", "same_run", "versions"]
