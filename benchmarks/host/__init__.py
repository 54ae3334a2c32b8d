"""Time of the host in calls on a GPU."""
