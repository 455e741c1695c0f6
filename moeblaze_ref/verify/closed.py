"""Imported first by the server that forks the checker's processes: no other process may open its memory."""

from moeblaze_ref.verify import guard

guard.keep_others_out()
