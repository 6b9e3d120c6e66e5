"""Events that change a job: departures, policy changes, stops, stuck workers."""
