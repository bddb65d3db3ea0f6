"""forerun on Ray: replicas of a server behind one address, and a batch spread over actors."""
