"""Where code runs that nobody vouches for: a process with all its descendants, bounded in time, memory, files and
reach, that ends without leaving anything."""
