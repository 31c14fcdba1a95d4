"""Looking inside trajectories: what was asked, what the policy did turn by turn, and which tokens were trained."""
