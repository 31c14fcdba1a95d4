"""Looking inside trajectories: where they lie, what training noted of them, what their tokens say."""
