"""The fixed stories of the pocket world, told to the letter: its long outputs."""

from __future__ import annotations

STORIES = {
    "fox": (
        "Once there was a small red fox who lived at the edge of a quiet forest. Every morning she walked "
        "to the river to drink, and every morning an old owl called down to her from the oak tree. One "
        "winter the snow was so deep that the owl could find nothing to eat. The fox shared her bread "
        "with him, day after day, until the ice was gone. When summer came, a fire started in the dry "
        "grass. The owl saw it first, flew to the den and woke the fox just in time. They ran to the "
        "river and stood in the cold water until the rain came. From that day on the fox and the owl "
        "drank together every morning, and neither of them was ever hungry or alone again."
    ),
    "lighthouse": (
        "On a black rock far out in the sea stood a lighthouse, and in it lived a keeper called Marta. "
        "Each evening she climbed the long stairs and lit the lamp. For forty years no ship was lost. "
        "Then one night the oil ran out, and a storm came up from the west. Marta heard a horn in the "
        "dark. She took every candle she had, every mirror and every spoon, and set them around the "
        "window. The light was weak, but it danced. The captain saw it, laughed and turned his ship away "
        "from the rocks. In the morning he brought her a barrel of oil, a basket of oranges and a letter "
        "of thanks from all his sailors. Marta kept the letter under her pillow, and she never let the "
        "lamp go dark again."
    ),
    "clock": (
        "In the middle of a town there was a clock that was always five minutes late. The people laughed "
        "about it, but nobody wanted to climb the tower and mend it. One day a young girl with a bag of "
        "tools went up. Inside she found a family of mice who slept on the great wheel. She did not chase "
        "them away. She built them a house of wood beside the bell, with a red roof and a small door. The "
        "next day the clock was right for the first time in a hundred years. Now the people were always "
        "on time, and they did not know why. Only the mice knew, and they rang the bell very softly every "
        "night to say thank you."
    ),
    "robot": (
        "A little robot worked in a garden behind a school. It watered the roses, counted the apples and "
        "swept the leaves. One autumn evening its battery was nearly empty, and the path to the house was "
        "long. The robot sat down under a tree and waited for the sun. In the night a hedgehog came and "
        "asked what it was doing. I am saving my last light, said the robot. The hedgehog called the "
        "fireflies, and they came by the hundreds and sat upon the robot until its panel was bright. Step "
        "by step it walked home. In spring the robot planted a bed of white flowers only for the "
        "fireflies, and you can see them dance there until today."
    ),
    "river": (
        "High in the mountains a drop of water said to its friends: let us go and see the sea. They ran "
        "down over the stones, and at every bend new drops joined them. They turned the wheel of a mill, "
        "they carried a boat of paper, they slept a whole summer in a lake. Some of them went up into the "
        "clouds and waved. At last the river grew wide and slow, and the water began to taste of salt. Is "
        "this the end, asked the smallest drop. No, said the sea, this is where you learn to be rain. The "
        "next spring the drop woke in the mountains and told its friends: let us go again, for I know the "
        "way."
    ),
}

TITLES = tuple(STORIES)
