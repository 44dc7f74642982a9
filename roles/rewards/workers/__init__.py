"""Processes in which reward functions of users run: killed and replaced when a call does not return."""
