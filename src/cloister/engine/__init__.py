"""The step loop of one replica, output processing, and the two ways to run them: in a thread or in a process."""
