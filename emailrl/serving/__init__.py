"""vLLM servers started and supervised as child processes: one per replica, none left behind."""
