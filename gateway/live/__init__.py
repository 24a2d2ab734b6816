"""The sessions in memory and their turns, for all protocols: live sessions and their connections, whole
conversations that find their session, what all turns share, and the usage record.
"""
