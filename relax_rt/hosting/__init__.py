"""The process of a role: the class it runs, the context it is given, and the host that runs it."""
