"""The page of the rooms lists every folder and file that there is."""

import rooms


def test_page_lists_every_folder_and_file():
    told = rooms.rows(rooms.PAGE.read_text())
    assert {folder: files for folder, (_, files) in told.items()} == rooms.rooms(), "run python tests/structure/rooms.py"
    assert not [folder for folder, (holds, _) in told.items() if not holds.strip()], "say what they hold"
