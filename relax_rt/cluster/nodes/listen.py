"""Where the head listens for nodes; the config's check of it, under the name that the nodes know."""

from __future__ import annotations

from relax_rt.config.listen import check_listen as check_listen
