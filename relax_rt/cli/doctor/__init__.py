"""`relax-rt doctor`: whether this machine, and a run on it, will work, before anything is started."""
