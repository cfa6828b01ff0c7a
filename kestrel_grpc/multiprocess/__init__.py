"""Serves one port with several processes: the supervisor, its children, and their channel to engine cores."""
