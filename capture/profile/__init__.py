"""What a step costs and what it earns on this machine, and the schedule that follows."""
