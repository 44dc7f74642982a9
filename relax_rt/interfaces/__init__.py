"""What every part of a run agrees on: the role base class, the registry's interface and who its members are."""
