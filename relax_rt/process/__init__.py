"""Child processes: start, watch, log, limit, fork from a zygote and end them. Knows no role and no supervisor."""
