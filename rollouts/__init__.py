"""Generation: questions in, groups of trajectories out. One vLLM engine a process; the agent loop itself knows no vLLM."""
