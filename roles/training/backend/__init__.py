"""What every training backend has in common."""
