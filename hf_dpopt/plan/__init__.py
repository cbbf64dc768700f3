"""Planning, from what was asked for to what runs: the configuration, the noise it means, the proof, the plan."""
